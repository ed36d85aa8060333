// The choice of instruction set for a linear layer's products, their memory, and how rows are shared out.
#include "linear_layer.h"

#include "isa.h"
#include "linear_routes.h"
#include "parallel.h"

namespace wnfused::cpu {
namespace {

constexpr int64_t kAlone = int64_t{1} << 18;  // multiply-adds below which a second worker costs more than it brings
constexpr int64_t kGradientFloats = int64_t{1} << 17;  // of dw that an item should hold
constexpr int64_t kOwnFloats = int64_t{1} << 18;  // of a packed x that each worker keeps for itself
constexpr int64_t kPackedFloats = int64_t{1} << 21;  // .. and of the part of x that it packs forward

int64_t workers_for(const LinearShape& shape) {
  return shape.rows * shape.inner * shape.features < kAlone ? 1 : worker_limit();
}

// Of `count` rows or columns, so many as make an item: few enough for each of `parts` to have one.
int64_t fair_share(int64_t count, int64_t parts, int64_t least, int64_t most) {
  return std::clamp(divide_up(divide_up(count, parts), least) * least, least, most);
}

#if defined(__x86_64__)
constexpr int64_t kAvx2Rows = 64;  // of x from which on the vendor's product, held to AVX2, is as fast
#endif

}  // namespace

const LinearKernels* linear_kernels(bool bfloat16, int64_t rows) {
#if defined(__x86_64__)
  if (bfloat16) return active_pair_products() == PairProducts::kDots ? &avx512_bf16::linear_kernels : nullptr;
  if (active_isa() == Isa::kAvx512) return &avx512::linear_kernels;
  if (active_isa() == Isa::kAvx2 && rows <= kAvx2Rows) return &avx2::linear_kernels;
#endif
  (void)bfloat16;
  (void)rows;
  return nullptr;
}

void linear_by_products(const LinearKernels& kernels, const LinearCall& call) {
  const auto [rows, inner, features] = call.shape;
  const int64_t workers = workers_for(call.shape);
  // To divide the rows of x has every worker pack all of v, to divide v all of x, which costs three times as much.
  const bool divide_x = workers > 1 && features < 3 * rows;
  const int64_t most_blocks = std::clamp<int64_t>(kPackedFloats / (inner * kLanes) / 2 * 2, 2, kWideBlocks);
  const int64_t wide_blocks = divide_x ? fair_share(rows, workers, 2 * kLanes, most_blocks * kLanes) / kLanes
                                       : std::min(most_blocks, divide_up(rows, kLanes));
  const int64_t groups = divide_up(rows, wide_blocks * kLanes);
  const int64_t row_block = fair_share(features, divide_up(workers, groups), kLanes, kNarrowRows);
  const int64_t packed = WideShape(wide_blocks * kLanes, inner, kernels.entries).size();
  const int64_t own = kNarrowRows * (kDepthChunk + kWideBlocks * kLanes);
  const Workspace memory(workers * (packed + own));
  const LinearForward job{
      rows, inner, features, values_of(call.x), values_of(call.v), values_of(call.y),
      call.residual ? values_of(*call.residual) : Values{nullptr, call.is_half()}, call.gain, call.bias, call.norms,
      call.activation, call.slope, wide_blocks, row_block,
      {memory.data(), memory.data() + workers * packed, packed, own}};
  run_workers(workers, [&](Worker& worker) { kernels.forward(job, worker); });
}

void linear_by_products_backward(const LinearKernels& kernels, const LinearGradient& call, const Tensor& dz) {
  const auto [rows, inner, features] = call.shape;
  const int64_t workers = workers_for(call.shape);
  const WideShape shape(inner, rows, kernels.entries);
  const int64_t columns = shape.blocks * kLanes;
  const int64_t wide_lanes =
      fair_share(inner, divide_up(workers, divide_up(rows, kInputRows)), 2 * kLanes, kWideBlocks * kLanes);
  const int64_t most_rows = std::clamp(kGradientFloats / columns / kLanes * kLanes, int64_t{kLanes}, kNarrowRows);
  const int64_t row_block = fair_share(features, workers, kLanes, most_rows);
  const bool shared = workers > 1 && shape.size() > kOwnFloats;
  const int64_t packed = call.dv ? shape.size() : 0, copies = shared ? 1 : workers;
  const int64_t inputs = call.dx ? kWideBlocks * kLanes * (kDepthChunk + kInputRows) : 0;
  const int64_t weights = call.dv ? row_block * columns : 0;
  const int64_t own = kNarrowRows * kDepthChunk + std::max(inputs, weights);
  const Workspace memory(copies * packed + workers * own);
  const std::vector<float> scale = scales_of(call.gain, call.norms, features);
  const LinearBackward job{
      rows, inner, features, values_of(call.x), values_of(call.v), values_of(dz),
      call.dx ? values_of(*call.dx) : Values{nullptr, call.is_half()},
      call.dv ? values_of(*call.dv) : Values{nullptr, is_bfloat16(call.v)}, call.gain, call.norms, scale.data(),
      call.dgain, wide_lanes / kLanes, row_block,
      {memory.data(), memory.data() + copies * packed, shared ? 0 : packed, own}};
  run_workers(workers, [&](Worker& worker) { kernels.backward(job, worker); });
}

}  // namespace wnfused::cpu

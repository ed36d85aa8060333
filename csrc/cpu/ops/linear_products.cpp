// The choice of instruction set for a linear layer's products, their memory, and how rows are shared out.
#include "cpu/linear/linear_layer.h"

#include <mutex>

#include "cpu/layer/gains.h"
#include "cpu/machine/parallel.h"
#include "cpu/ops/linear_routes.h"
#include "cpu/ops/product_shares.h"

namespace wnfused::cpu {
namespace {

constexpr int64_t kGradientFloats = int64_t{1} << 17;  // of dw that an item should hold
constexpr int64_t kPackedFloats = int64_t{1} << 21;  // of the part of x that a worker packs in the forward
constexpr int64_t kOwnFloats = int64_t{1} << 18;  // of a packed x that each worker keeps for itself

int64_t workers_for(const LinearShape& shape) { return product_workers(shape.rows * shape.inner * shape.features); }

// Whether the rows of a matrix, and its columns if they are asked for, have the range that `kernels` needs, if any.
bool rows_in_range(const LinearKernels& kernels, const Tensor& matrix, int64_t rows, int64_t length, bool columns) {
  if (!kernels.rows_in_range) return true;
  const float* data = entries<float>(matrix);
  std::vector<uint32_t> largest(columns ? length : 0, 0);
  std::atomic<bool> all{true};
  std::mutex adding;
  for_rows(0, rows, length, [&](int64_t begin, int64_t end) {
    std::vector<uint32_t> own(largest.size(), 0);
    if (!kernels.rows_in_range(data, begin, end, length, columns ? own.data() : nullptr)) all = false;
    const std::lock_guard<std::mutex> lock(adding);
    std::transform(own.begin(), own.end(), largest.begin(), largest.begin(),
                   [](uint32_t a, uint32_t b) { return std::max(a, b); });
  });
  return all && std::all_of(largest.begin(), largest.end(), in_split_range);
}

}  // namespace

bool linear_by_products(const LinearKernels& kernels, const LinearCall& call) {
  const auto [rows, inner, features] = call.shape;
  if (!rows_in_range(kernels, call.x, rows, inner, false)) return false;
  const int64_t workers = workers_for(call.shape);
  constexpr int64_t kTransposed = 12;  // x is
  const int64_t lane_blocks = divide_up(rows, kLanes), most_blocks = lane_blocks_in(kPackedFloats, inner);
  const int64_t lanes = std::min(most_blocks, lane_blocks) * kLanes;
  const int64_t item_rows = kernels.tiles ? tile_item_rows(lanes) : kNarrowRows;
  const auto [groups, row_blocks, cost] =
      share_products({lane_blocks, most_blocks, features, item_rows, kTransposed}, workers);
  const int64_t packed = WideShape(groups.largest() * kLanes, inner, kernels.unit).size() + kApart;
  const int64_t own = kNarrowRows * kDepthChunk + item_rows * (kLanes + kWideBlocks * kLanes) + kApart;
  const Workspace memory(workers * (packed + own));
  std::atomic<bool> out_of_range{false};
  LinearForward job{
      rows, inner, features, values_of(call.x), values_of(call.v), values_of(call.y),
      call.residual ? values_of(*call.residual) : Values{nullptr, call.is_half()}, call.gain, call.bias, call.norms,
      call.activation, call.slope, groups, row_blocks,
      {memory.data(), memory.data() + workers * packed, packed, own}, &out_of_range, false};
  const auto run = [&] { run_workers(workers, [&](Worker& worker) { kernels.forward(job, worker); }); };
  run();
  if (!out_of_range || kernels.unit.pieces > 1) return !out_of_range;
  // All of it again: which rows share an item, with one that needs this, depends on the number of workers.
  job.scales_first = true;
  run();
  return true;
}

bool linear_by_products_backward(const LinearKernels& kernels, const LinearGradient& call, const Tensor& dz) {
  const auto [rows, inner, features] = call.shape;
  if (!rows_in_range(kernels, dz, rows, features, call.dv.has_value())) return false;
  if (call.dv && !rows_in_range(kernels, call.x, rows, inner, true)) return false;
  const int64_t workers = workers_for(call.shape);
  const WideShape shape(inner, rows, kernels.unit);
  const int64_t columns = shape.blocks * kLanes;
  const Cut input_rows = cut(rows, kInputRows / kLanes, rows > kInputRows ? workers : 1);
  const Cut input_columns = cut(inner, kWideBlocks, divide_up(workers, input_rows.parts));
  const int64_t most_blocks = std::clamp(kGradientFloats / columns / kLanes, int64_t{1}, kNarrowRows / kLanes);
  const Cut row_blocks = cut(features, most_blocks, workers);
  const bool shared = workers > 1 && shape.size() > kOwnFloats;
  const int64_t packed = call.dv ? shape.size() + kApart : 0, copies = shared ? 1 : workers;
  const int64_t inputs = call.dx ? kWideBlocks * kLanes * kDepthChunk + row_stride(kWideBlocks) * kInputRows : 0;
  const int64_t weights = call.dv ? row_blocks.largest() * kLanes * row_stride(shape.blocks) : 0;
  const int64_t own = kNarrowRows * kDepthChunk + std::max(inputs, weights) + kApart;
  const Workspace memory(copies * packed + workers * own);
  const std::vector<float> scale = scales_of(call.gain, call.norms, features);
  std::atomic<bool> out_of_range{false};
  const LinearBackward job{
      rows, inner, features, values_of(call.x), values_of(call.v), values_of(dz),
      call.dx ? values_of(*call.dx) : Values{nullptr, call.is_half()},
      call.dv ? values_of(*call.dv) : Values{nullptr, is_bfloat16(call.v)}, call.gain, call.norms, scale.data(),
      call.dgain, input_rows, input_columns, row_blocks,
      {memory.data(), memory.data() + copies * packed, shared ? 0 : packed, own}, &out_of_range};
  run_workers(workers, [&](Worker& worker) { kernels.backward(job, worker); });
  return !out_of_range;
}

}  // namespace wnfused::cpu

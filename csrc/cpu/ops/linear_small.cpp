// A linear layer with a handful of rows of x (small.h).
#include <atomic>

#include "cpu/layer/gains.h"
#include "cpu/layer/passes.h"
#include "cpu/ops/linear_routes.h"

namespace wnfused::cpu {
namespace {

// Up to so many rows of x in bfloat16, and in pairs as they lie.
constexpr int64_t kHalfRows = 4, kRowsOfPairs = 16;

// Up to so many rows of x, in floats, beside products of this library: short rows pay too much for the sums across a
// vector, and long ones are read again for every eight rows of x.
int64_t most_rows_forward(int64_t inner) {
  constexpr int64_t kTiny = 16, kShort = 96, kLong = 512, kMost = 24;
  static_assert(kMost <= kSmallRows);
  return inner < kTiny ? 4 : inner < kShort ? 10 : inner <= kLong ? kMost : 12;
}

// The same beside panels: many short rows are worth dividing among workers, and long ones dx is added to again and
// again.
int64_t most_rows_backward(int64_t inner, int64_t features) {
  constexpr int64_t kShort = 96, kLong = 512, kMany = 256, kMost = 24;
  if (inner < kShort) return features <= kMany ? kMost : 10;
  return inner <= kLong ? 16 : 9;
}

// Products of pairs as they lie in memory.
bool takes_pairs(const LinearCall& call, const LinearKernels* products) {
  const LinearShape& shape = call.shape;
  return products && products->small_pairs && call.is_half() && is_bfloat16(call.v) && shape.inner % 2 == 0 &&
         shape.rows <= (shape.inner < 256 ? kRowsOfPairs / 2 : kRowsOfPairs);
}

}  // namespace

// Measured beside the products of AVX-512, and without them beside MKL's: many rows of x make the backward a matter of
// loads and stores of dx. Products of bfloat16 have an instruction of their own.
bool is_small(const LinearCall& call, const LinearKernels* products) {
  const LinearShape& shape = call.shape;
  if (takes_pairs(call, products)) return true;
  if (call.is_half()) return shape.rows <= kHalfRows;
  if (products) return shape.rows <= most_rows_forward(shape.inner);
  return shape.rows <= kSmallRows / 2 || (shape.rows <= kSmallRows && shape.inner >= 128);
}

bool is_small(const LinearGradient& call, const LinearKernels* products) {
  const LinearShape& shape = call.shape;
  if (call.is_half()) return shape.rows <= (products ? kHalfRows / 2 : kHalfRows);
  if (products) return shape.rows <= most_rows_backward(shape.inner, shape.features);
  return shape.rows <= kSmallRows / 2 ||
         (shape.rows <= kSmallRows && shape.features * shape.inner <= (int64_t{1} << 18));
}

bool small_linear(const LinearCall& call, const LinearKernels* products) {
  std::vector<float> held_x, held_residual;
  const LinearShape& shape = call.shape;
  const bool pairs = takes_pairs(call, products);
  const auto kernel = pairs ? products->small_pairs : layer_kernels().small_linear;
  const Values x = pairs ? values_of(call.x) : Values{const_cast<float*>(floats_of(call.x, held_x)), false};
  const SmallLinear task{
      shape.rows, shape.inner, shape.features, x, values_of(call.v), call.gain, call.bias,
      call.residual ? floats_of(*call.residual, held_residual) : nullptr, values_of(call.y), call.norms,
      call.activation, call.slope};
  std::atomic<bool> in_range{true};
  // In cache an instruction costs twice what an entry does in the passes that kGrain is for.
  for_rows(0, shape.features, 2 * shape.summed_work() / kLanes, [&](int64_t begin, int64_t end) {
    if (!kernel(task, begin, end)) in_range = false;
  });
  if (shape.rows == 0) row_norms(call.v, call.norms, 0, shape.features);
  return in_range;
}

// Shares of v's rows, as many as their size is worth, sum dx apart; what they found is added up in their order.
void small_linear_backward(const LinearGradient& call, const Tensor& dz) {
  constexpr int64_t kMostShares = 16, kLeastFeatures = 64;
  const LinearShape& shape = call.shape;
  std::vector<float> held_x, held_dz;
  std::optional<Rounded> rounded;
  float* dx = nullptr;
  if (call.dx && call.is_half()) dx = rounded.emplace(*call.dx).data();
  else if (call.dx) dx = static_cast<float*>(call.dx->mutable_data_ptr());
  const Values dv = call.dv ? values_of(*call.dv) : Values{nullptr, is_bfloat16(call.v)};
  const SmallLinearBackward task{
      shape.rows, shape.inner, shape.features, floats_of(call.x, held_x), values_of(call.v), call.gain, call.norms,
      floats_of(dz, held_dz), nullptr, dv, call.dgain, nullptr};

  const int64_t size = shape.rows * shape.inner;
  constexpr int64_t kRow = 128;  // what a row of v costs beside its entries, in entries
  const int64_t work = shape.features * (shape.inner + kRow) * std::max<int64_t>(shape.rows / 2, 1);
  const int64_t worth = std::min(work / (2 * kGrain), shape.features / kLeastFeatures);
  const int64_t shares = std::clamp<int64_t>(worth, 1, kMostShares);
  const int64_t features = divide_up(shape.features, shares);
  // A single row's dw is not kept between two passes; that of no row is zeros, which are.
  const int64_t room = dv.bfloat16 && shape.rows != 1 ? kSmallTile * shape.inner : 0;
  std::vector<float> partial(dx ? (shares - 1) * size : 0, 0.0f), scratch(shares * room);
  if (dx) std::fill(dx, dx + size, 0.0f);
  share_out(0, shares, 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      SmallLinearBackward part = task;
      part.dx = !dx ? nullptr : s == 0 ? dx : partial.data() + (s - 1) * size;
      part.scratch = scratch.data() + s * room;
      layer_kernels().small_linear_backward(
          part, std::min(shape.features, s * features), std::min(shape.features, (s + 1) * features));
    }
  });
  if (!dx) return;
  for (int64_t s = 1; s < shares; ++s)
    for (int64_t i = 0; i < size; ++i) dx[i] += partial[(s - 1) * size + i];
  if (rounded) rounded->round();
}

}  // namespace wnfused::cpu

// A linear layer of floats by rows of v that are turned in registers (turned.h), and how it is shared out.
#include <algorithm>
#include <atomic>

#include "cpu/layer/gains.h"
#include "cpu/machine/isa.h"
#include "cpu/machine/parallel.h"
#include "cpu/machine/workspace.h"
#include "cpu/ops/linear_routes.h"
#include "cpu/ops/product_shares.h"

namespace wnfused::cpu {
namespace {

constexpr int64_t kMostInner = 4096;  // of a row, 16 of which fill a quarter of a megabyte: they stay in L2
constexpr int64_t kMostOfX = int64_t{1} << 20;  // floats that every 16 rows of v pass by

// How many parts rows of x and features are cut into, for as many workers: by the one or the other.
struct Cuts {
  int64_t rows, features;
};

Cuts cuts_for(const LinearShape& shape, int64_t workers) {
  const int64_t blocks = divide_up(shape.features, kLanes), tiles = divide_up(shape.rows, kTurnedTile);
  const int64_t part = divide_up(tiles, workers) * kTurnedTile;  // of the rows
  const int64_t by_features = divide_up(blocks, workers) * (shape.rows + kTurnedCost);
  const int64_t by_rows = blocks * (part + kTurnedCost);
  return by_rows < by_features ? Cuts{std::min(workers, tiles), 1} : Cuts{1, std::min(workers, blocks)};
}

// Part `index` of `count` of so many entries, a multiple of `step` except for the last; and where the next one begins.
int64_t begin_of(int64_t entries, int64_t step, int64_t index, int64_t count) {
  const int64_t steps = divide_up(entries, step);
  return std::min(entries, steps * index / count * step);
}

}  // namespace

// Measured beside small.h, the products of AVX-512, and those of the vendor held to AVX2 (bench/NOTES.md).
bool is_turned(const LinearCall& call, bool small) {
  constexpr int64_t kLeastFeatures = 8, kFewRows = 64;
  const LinearShape& shape = call.shape;
  const bool floats = call.x.scalar_type() == ScalarType::Float && call.v.scalar_type() == ScalarType::Float;
  if (!layer_kernels().turned_linear || !floats || shape.is_empty() || shape.inner > kMostInner) return false;
  if (small) return shape.turned_work() * round_up(shape.features, kLanes) < shape.summed_work() * shape.features;
  return active_isa() == Isa::kAvx512 || shape.features >= kLeastFeatures || shape.rows <= kFewRows;
}

bool turned_linear(const LinearCall& call) {
  const LinearShape& shape = call.shape;
  std::vector<float> held;
  const SmallLinear task{
      shape.rows, shape.inner, shape.features, values_of(call.x), values_of(call.v), call.gain, call.bias,
      call.residual ? floats_of(*call.residual, held) : nullptr, values_of(call.y), call.norms, call.activation,
      call.slope};
  const int64_t workers = product_workers(shape.turned_work() * divide_up(shape.features, kLanes) * kLanes);
  const Cuts cuts = cuts_for(shape, workers);
  const int64_t room = round_up(shape.inner, kLanes) * kLanes, shares = cuts.rows * cuts.features;
  const int64_t rows_at_once = std::max(kMostOfX / shape.inner / kTurnedTile, int64_t{8}) * kTurnedTile;
  const Workspace memory(shares * room);
  std::atomic<bool> in_range{true};
  share_out(0, shares, 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      const int64_t first = begin_of(shape.rows, kTurnedTile, s % cuts.rows, cuts.rows);
      const int64_t last = begin_of(shape.rows, kTurnedTile, s % cuts.rows + 1, cuts.rows);
      TurnedShare share{0, 0, begin_of(shape.features, kLanes, s / cuts.rows, cuts.features),
                        begin_of(shape.features, kLanes, s / cuts.rows + 1, cuts.features), memory.data() + s * room};
      for (int64_t m = first; m < last; m += rows_at_once) {
        share.row_begin = m;
        share.row_end = std::min(last, m + rows_at_once);
        if (!layer_kernels().turned_linear(task, share)) in_range = false;
      }
    }
  });
  return in_range;
}

}  // namespace wnfused::cpu

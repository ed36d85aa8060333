// A linear layer of floats by panels of 16 columns (panel.h), and how it is shared out.
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

constexpr int64_t kMostInner = 4096;  // of a row, 32 of which, two panels, fill half a megabyte: they stay in L2
constexpr int64_t kMostOfX = int64_t{1} << 17;  // floats of rows of x that all of v passes by at a time: half of L2
constexpr int64_t kLeastRows = 192;  // of them, a multiple of a tile, beside which turning v again costs little

// A single feature would fill one lane of a vector: a matrix by a vector is the vendor's.
bool have_panels(const LinearShape& shape, const Tensor& x, const Tensor& v) {
  const bool floats = x.scalar_type() == ScalarType::Float && v.scalar_type() == ScalarType::Float;
  return panel_kernels() && floats && !shape.is_empty() && shape.features > 1;
}

// How many parts rows of x and features are cut into, for as many workers: by the one or the other.
struct Cuts {
  int64_t rows, features;
};

Cuts cuts_for(const LinearShape& shape, int64_t workers) {
  const int64_t tile = panel_kernels()->tile;
  const int64_t blocks = divide_up(shape.features, kLanes), tiles = divide_up(shape.rows, tile);
  const int64_t part = divide_up(tiles, workers) * tile;  // of the rows
  const int64_t by_features = divide_up(blocks, workers) * (shape.rows + kPanelCost);
  const int64_t by_rows = blocks * (part + kPanelCost);
  // A large x every worker would read from memory.
  const bool divides_rows = by_rows < by_features || (shape.rows * shape.inner > kMostOfX && part > kLeastRows);
  return divides_rows ? Cuts{std::min(workers, tiles), 1} : Cuts{1, std::min(workers, blocks)};
}

// Part `index` of `count` of so many entries, a multiple of `step` except for the last; and where the next one begins.
int64_t begin_of(int64_t entries, int64_t step, int64_t index, int64_t count) {
  const int64_t steps = divide_up(entries, step);
  return std::min(entries, steps * index / count * step);
}

// A product of rows by panels, all of which every worker makes where the rows are divided among them.
struct ProductCuts {
  Cut rows, blocks;
};

// most_rows: in a part.
ProductCuts product_cuts(int64_t rows, int64_t blocks, int64_t most_rows, int64_t workers) {
  constexpr int64_t kPanel = 2;  // the cost of making one, in rows
  const int64_t row_blocks = divide_up(rows, kLanes), most = std::max(most_rows / kLanes, int64_t{1});
  const int64_t by_rows = blocks * (divide_up(row_blocks, workers) * kLanes + kPanel);
  const int64_t by_blocks = divide_up(blocks, workers) * (rows + kPanel);
  const bool divides_rows = by_rows <= by_blocks;
  return {cut_blocks(row_blocks, most, divides_rows ? workers : 1),
          cut_blocks(blocks, blocks, divides_rows ? 1 : workers)};
}

}  // namespace

// Measured beside small.h, the products of AVX-512, and those of the vendor on AVX2 alone (bench/NOTES.md). There few
// rows of x are taken past a long v by products, unless the sums are so few that they are worth no packing.
bool are_panels(const LinearCall& call, bool small) {
  constexpr int64_t kLeastFeatures = 8, kFewRows = 64, kLong = 256, kFewSums = 8192;
  const LinearShape& shape = call.shape;
  if (!have_panels(shape, call.x, call.v) || shape.inner > kMostInner) return false;
  if (small) return shape.panel_work() * round_up(shape.features, kLanes) < shape.summed_work() * shape.features;
  if (active_isa() == Isa::kAvx512) return true;
  if (shape.inner > kLong && shape.rows <= kFewRows) return shape.rows * shape.features <= kFewSums;
  return shape.features >= kLeastFeatures || shape.rows <= kFewRows;
}

bool linear_by_panels(const LinearCall& call) {
  const LinearShape& shape = call.shape;
  std::vector<float> held;
  const SmallLinear task{
      shape.rows, shape.inner, shape.features, values_of(call.x), values_of(call.v), call.gain, call.bias,
      call.residual ? floats_of(*call.residual, held) : nullptr, values_of(call.y), call.norms, call.activation,
      call.slope};
  constexpr int64_t kFinish = 3;  // what an entry of y costs beside its products, in multiply-adds
  const int64_t work = shape.panel_work() + kFinish * shape.rows;
  const int64_t workers = product_workers(work * divide_up(shape.features, kLanes) * kLanes);
  const Cuts cuts = cuts_for(shape, workers);
  const int64_t shares = cuts.rows * cuts.features, tile = panel_kernels()->tile;
  const int64_t room = panel_kernels()->panels * round_up(shape.inner, kLanes) * kLanes;
  const int64_t rows_at_once = std::max(kMostOfX / shape.inner / tile * tile, kLeastRows);
  const Workspace memory(shares * room);
  std::atomic<bool> in_range{true};
  share_out(0, shares, 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      const int64_t first = begin_of(shape.rows, tile, s % cuts.rows, cuts.rows);
      const int64_t last = begin_of(shape.rows, tile, s % cuts.rows + 1, cuts.rows);
      PanelShare share{0, 0, begin_of(shape.features, kLanes, s / cuts.rows, cuts.features),
                        begin_of(shape.features, kLanes, s / cuts.rows + 1, cuts.features), memory.data() + s * room};
      for (int64_t m = first; m < last; m += rows_at_once) {
        share.row_begin = m;
        share.row_end = std::min(last, m + rows_at_once);
        if (!panel_kernels()->forward(task, share)) in_range = false;
      }
    }
  });
  return in_range;
}

// Measured as above. Few columns of many rows are the fastest as pixels, unless features do not fill a block.
bool are_panels(const LinearGradient& call, const LinearKernels* products) {
  constexpr int64_t kFewColumns = 128, kFewFeatures = 64, kFewRows = 64, kManyRows = 1024;
  const LinearShape& shape = call.shape;
  if (!have_panels(shape, call.x, call.v)) return false;
  if (active_isa() != Isa::kAvx512) return shape.features <= kFewFeatures || shape.rows <= kFewRows;
  return shape.inner >= kFewColumns || (shape.features < kLanes && shape.rows <= kManyRows) ||
         !are_pixels(shape, call.x, call.v, products, true);
}

void linear_by_panels_backward(const LinearGradient& call, const Tensor& dz) {
  constexpr int64_t kMostOfRows = int64_t{1} << 17, kMostOfGradient = int64_t{1} << 17;  // floats of a part
  const auto [rows, inner, features] = call.shape;
  const int64_t workers = product_workers(rows * inner * features), blocks = divide_up(inner, kLanes);
  const auto most_rows = [](int64_t length) { return kMostOfRows / std::min(length, PanelBackward::kDepth); };
  const ProductCuts input = product_cuts(rows, blocks, most_rows(features), workers);
  const ProductCuts weight =
      product_cuts(features, blocks, std::min(most_rows(rows), kMostOfGradient / inner), workers);
  const int64_t stride = row_stride(divide_up(rows, kLanes)), turned = call.dv ? features * stride : 0;
  const int64_t depth = std::min(PanelBackward::kDepth, std::max(call.dx ? features : 0, call.dv ? rows : 0));
  const int64_t panels = PanelBackward::kGroup * depth * kLanes + kApart;
  const Workspace memory(turned + workers * panels);
  const std::vector<float> scale = scales_of(call.gain, call.norms, features);
  const auto out = [](std::optional<Tensor> t) { return t ? static_cast<float*>(t->mutable_data_ptr()) : nullptr; };
  const PanelBackward job{
      rows, inner, features, entries<float>(call.x), entries<float>(call.v), entries<float>(dz), call.gain, call.norms,
      scale.data(), out(call.dx), out(call.dv), call.dgain, input.rows, input.blocks, weight.rows, weight.blocks,
      memory.data(), stride, memory.data() + turned, panels};
  run_workers(workers, [&](Worker& worker) { panel_kernels()->backward(job, worker); });
}

}  // namespace wnfused::cpu

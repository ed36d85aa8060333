// The choice between a division by lanes and one by rows, and its costs.
#include "cpu/ops/product_shares.h"

#include "cpu/machine/parallel.h"

namespace wnfused::cpu {
namespace {

constexpr int64_t kWorkEach = int64_t{1} << 17;  // multiply-adds below which one worker more costs more than it brings

ProductShares divide(const ProductShape& shape, int64_t workers, int64_t lane_sharers) {
  constexpr int64_t kPackNarrow = 4;
  const Cut groups = cut_blocks(shape.lane_blocks, shape.most_blocks, lane_sharers);
  const Cut row_blocks = cut(shape.rows, shape.item_rows / kLanes, divide_up(workers, groups.parts));
  const int64_t sharers = std::min(lane_sharers, groups.count);
  const int64_t lanes = divide_up(groups.count, sharers) * kLanes;
  const int64_t rows = divide_up(row_blocks.count, divide_up(workers, sharers)) * kLanes;
  return {groups, row_blocks, lanes * rows + shape.wide_cost * lanes + kPackNarrow * rows};
}

}  // namespace

int64_t product_workers(int64_t products) { return std::clamp<int64_t>(products / kWorkEach, 1, worker_limit()); }

int64_t lane_blocks_in(int64_t floats, int64_t depth) {
  return std::clamp<int64_t>(floats / (depth * kLanes) / 2 * 2, 2, kWideBlocks);
}

Cut cut_blocks(int64_t count, int64_t most, int64_t sharers) {
  return {count, std::min(count, divide_up(divide_up(count, most), sharers) * sharers)};
}

Cut cut(int64_t entries, int64_t most, int64_t sharers) {
  return cut_blocks(divide_up(entries, kLanes), most, sharers);
}

ProductShares share_products(const ProductShape& shape, int64_t workers) {
  const ProductShares by_lanes = divide(shape, workers, workers);
  const ProductShares by_rows = divide(shape, workers, 1);
  return by_lanes.cost <= by_rows.cost ? by_lanes : by_rows;
}

}  // namespace wnfused::cpu

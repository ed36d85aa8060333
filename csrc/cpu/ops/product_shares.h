// How a product of packed matrices (gemm.h) is shared out among workers.
#pragma once

#include "cpu/linear/linear_layer.h"

namespace wnfused::cpu {

// Workers for so many multiply-adds.
int64_t product_workers(int64_t products);

// The fewest parts of at most `most` blocks of which every one of `sharers` gets the same number. count: of blocks.
Cut cut_blocks(int64_t count, int64_t most, int64_t sharers);
Cut cut(int64_t entries, int64_t most, int64_t sharers);  // of 16

// How many blocks of lanes of a wide operand have so many floats, or the most that a product takes.
int64_t lane_blocks_in(int64_t floats, int64_t depth);

// A product of so many blocks of lanes of a wide operand, at most `most_blocks` packed at a time, by `rows` of a narrow
// one, which is packed `item_rows` at a time. wide_cost: of packing an entry of the wide one, in multiply-adds.
struct ProductShape {
  int64_t lane_blocks, most_blocks, rows, item_rows, wide_cost;
};

struct ProductShares {
  Cut groups, row_blocks;
  int64_t cost;  // of a worker for each unit of the depth, in multiply-adds
};

// If the lanes are divided among the workers, every one of them packs all rows; if the rows, all lanes.
ProductShares share_products(const ProductShape& shape, int64_t workers);

}  // namespace wnfused::cpu

// How an instruction set multiplies pairs of bfloat16 (pairs.h).
#pragma once

#include <cstdint>

#include "cpu/vec/lanes.h"

namespace wnfused::cpu {

constexpr int kMaxGroups = 16;  // register tiles of one call of a pair product
constexpr int kTileSums = 1280;  // floats of the register tiles that are summed at once, at most

// Floats that hold so many bfloat16, whole cache lines.
constexpr int64_t panel_floats(int64_t elements) { return round_up(divide_up(elements, 2), kLanes); }

// Where the rows and the bank of one part of a product's depth begin.
struct Segment {
  const uint16_t* rows;
  const uint16_t* bank;
};

// Floats that hold so many, whole cache lines.
constexpr int64_t segment_floats(int64_t count) {
  return round_up(count * static_cast<int64_t>(sizeof(Segment) / sizeof(float)), kLanes);
}

// Rows of a panel at once, and what the depth must be a multiple of. is_matrix: one instruction multiplies matrices
// (AMX), so that a product sums over a whole chunk at once; dot products do line by line.
struct PairTile {
  int64_t rows, depth;
  bool is_matrix;
};

}  // namespace wnfused::cpu

// How an instruction set multiplies pairs of bfloat16 (pairs.h).
#pragma once

#include <cstdint>

namespace wnfused::cpu {

constexpr int kMaxGroups = 16;  // register tiles of one call of a pair product
constexpr int kTileSums = 1280;  // floats of the register tiles that are summed at once, at most

// Rows of a panel at once, and what the depth must be a multiple of. Tiles sum over a whole chunk at once, dot products
// line by line.
struct PairTile {
  int64_t rows, depth;
  bool flat;
};

}  // namespace wnfused::cpu

// The operands of the products in gemm.h.
#pragma once

#include <algorithm>

#include "cpu/vec/lanes.h"

namespace wnfused::cpu {

constexpr int64_t kDepthChunk = 256;  // units of the depth that are packed at a time, at most
constexpr int64_t kNarrowRows = 64;
constexpr int64_t kWideBlocks = 16;

// A unit of the depth: a float, two bfloat16, or two floats as `pieces` pairs of bfloat16 that add up to them. A
// product takes `step` units at a time, and at most `chunk` are packed.
struct DepthUnit {
  int64_t entries, step = 1, chunk = kDepthChunk, pieces = 1;
};

// A packed wide operand, [chunk][block][piece][units of a chunk][16 lanes].
struct WideShape {
  WideShape(int64_t lanes, int64_t depth, const DepthUnit& unit)
      : blocks(divide_up(lanes, kLanes)),
        units(divide_up(divide_up(depth, unit.entries), unit.step) * unit.step),
        chunk(unit.chunk),
        chunks(divide_up(units, chunk)),
        piece_floats(std::min(units, chunk) * kLanes),
        block_floats(unit.pieces * piece_floats) {}

  int64_t blocks, units, chunk, chunks, piece_floats, block_floats;

  int64_t chunk_units(int64_t index) const { return std::min(chunk, units - index * chunk); }
  int64_t at(int64_t index, int64_t block) const { return (index * blocks + block) * block_floats; }
  int64_t size() const { return chunks * blocks * block_floats; }
};

}  // namespace wnfused::cpu

// The operands of the products in gemm.h.
#pragma once

#include <algorithm>

#include "cpu/vec/lanes.h"

namespace wnfused::cpu {

constexpr int64_t kDepthChunk = 256;  // units of the depth that are packed at a time
constexpr int64_t kNarrowRows = 64;
constexpr int64_t kWideBlocks = 16;

// A packed wide operand, [chunk][block][units of a chunk][16 lanes]. A unit: a float, or two bfloat16.
struct WideShape {
  WideShape(int64_t lanes, int64_t depth, int64_t entries)
      : blocks(divide_up(lanes, kLanes)),
        units(divide_up(depth, entries)),
        chunks(divide_up(units, kDepthChunk)),
        block_floats(std::min(units, kDepthChunk) * kLanes) {}

  int64_t blocks, units, chunks, block_floats;

  int64_t chunk_units(int64_t chunk) const { return std::min(kDepthChunk, units - chunk * kDepthChunk); }
  int64_t at(int64_t chunk, int64_t block) const { return (chunk * blocks + block) * block_floats; }
  int64_t size() const { return chunks * blocks * block_floats; }
};

}  // namespace wnfused::cpu

// What the ways to a weight gradient on bfloat16 operands (pair_wgrad.h) share.
#pragma once

#include "cpu/products/pairs.h"

namespace wnfused::cpu::WNFUSED_ISA {

// One chunk of a slice: gathers, then nine products.
struct GradientChunk {
  int64_t first_block, blocks;  // of outputs
  uint16_t* inputs;
  uint16_t* gradients;
  Segment* segments;
  float* bank;
  bool accumulate;
};

}  // namespace wnfused::cpu::WNFUSED_ISA

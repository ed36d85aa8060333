// The table of one instruction set's kernels on tiles; included by linear_<isa>.cpp.
#pragma once

#include "cpu/linear/tile_forward.h"

namespace wnfused::cpu::WNFUSED_ISA {

inline void linear_backward_on_tiles(const LinearBackward& job, Worker& worker) {
  Pairs::begin();
  linear_backward<TileUnits, uint16_t>(job, worker);
  Pairs::end();
}

const LinearKernels linear_kernels = {TileUnits::kUnit, true, nullptr, linear_forward_on_tiles, linear_backward_on_tiles};

}  // namespace wnfused::cpu::WNFUSED_ISA

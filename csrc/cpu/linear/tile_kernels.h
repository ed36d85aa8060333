// The tables of one instruction set's kernels on tiles; included by linear_<isa>.cpp.
#pragma once

#include "cpu/linear/tile_forward.h"

namespace wnfused::cpu::WNFUSED_ISA {

template <class Units, class X>
inline void linear_backward_on_tiles(const LinearBackward& job, Worker& worker) {
  Pairs::begin();
  linear_backward<Units, X>(job, worker);
  Pairs::end();
}

template <class Units, class X>
constexpr LinearKernels kTileKernels = {Units::kUnit,
                                        true,
                                        nullptr,
                                        linear_forward_on_tiles<Units, X>,
                                        linear_backward_on_tiles<Units, X>,
                                        Units::kUnit.pieces > 1 ? rows_in_split_range : nullptr};

const LinearKernels linear_kernels = kTileKernels<TileUnits, uint16_t>;
const LinearKernels split_linear_kernels = kTileKernels<SplitUnits, float>;

}  // namespace wnfused::cpu::WNFUSED_ISA

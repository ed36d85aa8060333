// The table of one instruction set's kernels on pairs of bfloat16; included by conv_<isa>.cpp after the header that
// brings Pairs.
#pragma once

#include "cpu/conv_layer/pair_layer.h"
#include "cpu/pair_window/driver.h"

namespace wnfused::cpu::WNFUSED_ISA {

const PairWindowKernels pair_window_kernels = {Pairs::kTile,
                                               {pair_window_forward<false>, pair_window_backward<false>},
                                               {pair_window_forward<true>, pair_window_backward<true>}};

}  // namespace wnfused::cpu::WNFUSED_ISA

// The table of one instruction set's kernels on pairs of bfloat16; included by conv_<isa>.cpp after the header that
// brings Pairs.
#pragma once

#include "cpu/conv_layer/driver.h"
#include "cpu/conv_layer/pair_layer.h"
#include "cpu/conv_layer/pair_parts.h"

namespace wnfused::cpu::WNFUSED_ISA {

const PairWindowKernels pair_window_kernels = {
    Pairs::kTile,
    {conv_layer_forward<PairParts<false>>, conv_layer_backward<PairParts<false>>},
    {conv_layer_forward<PairParts<true>>, conv_layer_backward<PairParts<true>>}};

}  // namespace wnfused::cpu::WNFUSED_ISA

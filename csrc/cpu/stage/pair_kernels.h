// The table of one instruction set's kernels on pairs of bfloat16; included by stage_<isa>.cpp after the header that
// brings Pairs.
#pragma once

#include "cpu/conv3x3/pair_wgrad.h"
// The driver finds the convolutions and weight gradients of both operands.
#include "cpu/stage/backward.h"

namespace wnfused::cpu::WNFUSED_ISA {

inline void pair_forward(const StageForward& job, Worker& worker) {
  Pairs::begin();
  forward<uint16_t>(job, worker);
  Pairs::end();
}

inline void pair_backward(const StageBackward& job, Worker& worker) {
  Pairs::begin();
  backward<uint16_t>(job, worker);
  Pairs::end();
}

const StagePairKernels stage_pair_kernels = {Pairs::kTile, {pair_forward, pair_backward}};

}  // namespace wnfused::cpu::WNFUSED_ISA

// The tables of one instruction set's kernels; included by stage_<isa>.cpp.
#pragma once

#include "conv3x3_driver.h"
#include "stage_driver.h"

namespace wnfused::cpu::WNFUSED_ISA {

const StageKernels stage_kernels = {forward<float>, backward<float>};

const Conv3x3Kernels conv3x3_kernels = {conv3x3_forward, conv3x3_backward};

}  // namespace wnfused::cpu::WNFUSED_ISA

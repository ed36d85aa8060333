// The table of one instruction set's kernels; included by stage_<isa>.cpp.
#pragma once

#include "stage_driver.h"

namespace wnfused::cpu::WNFUSED_ISA {

const StageKernels stage_kernels = {forward<float>, backward<float>};

}  // namespace wnfused::cpu::WNFUSED_ISA

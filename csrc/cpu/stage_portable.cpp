// The stage's kernels for 128-bit vectors, which every processor has.
#include "stage.h"

#define WNFUSED_ISA portable
#define WNFUSED_VECTOR_BITS 128
#include "stage_driver.h"

namespace wnfused::cpu::portable {
const StageKernels stage_kernels = {forward, backward};
}

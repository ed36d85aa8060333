#include "cpu/machine/isa.h"
#include "cpu/planes/planes.h"

namespace wnfused::cpu {

const PlanesKernels* planes_kernels() {
#if defined(__x86_64__)
  if (active_isa() == Isa::kAvx512) return &avx512::planes_kernels;
  if (active_isa() == Isa::kAvx2) return &avx2::planes_kernels;
#endif
  return nullptr;
}

}  // namespace wnfused::cpu

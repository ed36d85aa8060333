#include "cpu/machine/isa.h"
#include "cpu/strips/strips.h"

namespace wnfused::cpu {

const StripKernels* strip_kernels() {
#if defined(__x86_64__)
  if (active_isa() == Isa::kAvx512) return &avx512::strip_kernels;
  if (active_isa() == Isa::kAvx2) return &avx2::strip_kernels;
#endif
  return nullptr;
}

}  // namespace wnfused::cpu

#include "cpu/linear/few.h"
#include "cpu/linear/linear_layer.h"
#include "cpu/machine/isa.h"

namespace wnfused::cpu {

const FewKernels& few_kernels() {
#if defined(__x86_64__)
  if (active_isa() == Isa::kAvx512) return avx512::few_kernels;
  if (active_isa() == Isa::kAvx2) return avx2::few_kernels;
#endif
  return portable::few_kernels;
}

const PanelKernels* panel_kernels() {
#if defined(__x86_64__)
  if (active_isa() == Isa::kAvx512) return &avx512::panel_kernels;
  if (active_isa() == Isa::kAvx2) return &avx2::panel_kernels;
#endif
  return nullptr;
}

const LinearKernels* split_linear_kernels() {
  const PairProducts pairs = active_pair_products();
  if (pairs == PairProducts::kEmulatedTiles) return &amx_emulated::split_linear_kernels;
#if defined(__x86_64__)
  if (pairs == PairProducts::kTiles) return &amx::split_linear_kernels;
#endif
  return nullptr;
}

const LinearKernels* linear_kernels(bool bfloat16, [[maybe_unused]] int64_t rows) {
  const PairProducts pairs = active_pair_products();
  if (bfloat16 && pairs == PairProducts::kEmulatedTiles) return &amx_emulated::linear_kernels;
#if defined(__x86_64__)
  constexpr int64_t kAvx2Rows = 64;  // of x from which on the vendor's product, held to AVX2, is as fast
  if (bfloat16 && pairs == PairProducts::kTiles) return &amx::linear_kernels;
  if (bfloat16) return pairs == PairProducts::kDots ? &avx512_bf16::linear_kernels : nullptr;
  if (active_isa() == Isa::kAvx512) return &avx512::linear_kernels;
  if (active_isa() == Isa::kAvx2 && rows <= kAvx2Rows) return &avx2::linear_kernels;
#endif
  return nullptr;
}

}  // namespace wnfused::cpu

// A linear layer in bfloat16 for AVX-512 with dot products of pairs.
#if defined(__x86_64__)
#include "cpu/targets/plain.h"
#include "cpu/targets/target_avx512_bf16.h"

#define WNFUSED_ISA avx512_bf16
#include "cpu/linear/driver.h"
#include "cpu/linear/small.h"
#include "cpu/products/gemm_pairs.h"

namespace wnfused::cpu::WNFUSED_ISA {

// x and v in bfloat16, rows of whole pairs.
bool small_pairs(const SmallLinear& task, int64_t begin, int64_t end) {
  return small_slices<PairUnits>(task, static_cast<const float*>(task.v.data), begin, end);
}

const LinearKernels linear_kernels = {
    PairUnits::kUnit, false, small_pairs, linear_forward<PairUnits, uint16_t>, linear_backward<PairUnits, uint16_t>};

}  // namespace wnfused::cpu::WNFUSED_ISA

#include "cpu/targets/target_end.h"
#endif  // __x86_64__

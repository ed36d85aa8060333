// Orthonormal rows for AVX2.
#if defined(__x86_64__)
#include "cpu/targets/plain.h"
#include "cpu/targets/target_avx2.h"

#include "cpu/orthonormal/kernels.h"
#include "cpu/targets/target_end.h"
#endif  // __x86_64__

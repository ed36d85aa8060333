// Orthonormal rows for AVX-512.
#if defined(__x86_64__)
#include "cpu/targets/plain.h"
#include "cpu/targets/target_avx512.h"

#include "cpu/orthonormal/kernels.h"
#include "cpu/targets/target_end.h"
#endif  // __x86_64__

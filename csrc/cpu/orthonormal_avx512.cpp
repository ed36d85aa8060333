// Orthonormal rows for AVX-512.
#if defined(__x86_64__)
#include "orthonormal.h"
#include "stage.h"
#include "target_avx512.h"

#include "orthonormal_kernels.h"
#include "target_end.h"
#endif  // __x86_64__

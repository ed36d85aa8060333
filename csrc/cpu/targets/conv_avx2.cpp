// The kernels of stages and convolution layers for AVX2 + FMA.
#if defined(__x86_64__)
#include "cpu/targets/plain.h"
#include "cpu/targets/target_avx2.h"

#include "cpu/targets/conv_kernels.h"
#include "cpu/targets/target_end.h"
#endif  // __x86_64__

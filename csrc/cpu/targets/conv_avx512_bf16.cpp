// Convolution layers on bfloat16 for AVX-512 with dot products of pairs.
#if defined(__x86_64__)
#include "cpu/targets/plain.h"
#include "cpu/targets/target_avx512_bf16.h"

#define WNFUSED_ISA avx512_bf16
#include "cpu/products/pair_dots.h"
#include "cpu/conv_layer/pair_kernels.h"
#include "cpu/targets/target_end.h"
#endif  // __x86_64__

// The stage's kernels on bfloat16 for AVX-512 with dot products of pairs.
#if defined(__x86_64__)
#include "stage.h"
#include "target_avx512_bf16.h"

#define WNFUSED_ISA avx512_bf16
#include "stage_dots.h"
#include "stage_pair_kernels.h"
#include "target_end.h"
#endif  // __x86_64__

// The stage's kernels for AVX2 + FMA.
#if defined(__x86_64__)
#include "conv_layer.h"
#include "linear_layer.h"
#include "target_avx2.h"

#include "stage_kernels.h"
#include "target_end.h"
#endif  // __x86_64__

// A single layer's kernels for AVX2 + FMA.
#if defined(__x86_64__)
#include <type_traits>

#include "layer.h"
#include "linear_layer.h"
#include "stage.h"
#include "target_avx2.h"

#include "layer_kernels.h"
#include "target_end.h"
#endif  // __x86_64__

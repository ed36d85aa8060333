// A single layer's kernels for AVX2 + FMA.
#if defined(__x86_64__)
#include <immintrin.h>

#include <type_traits>

#include "layer.h"
#include "stage.h"

// Only code below this line may use the instruction set, and all of it lives in a namespace of its own: no function the
// linker could share with another translation unit is compiled for it.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi2")
#endif

#define WNFUSED_ISA avx2
#define WNFUSED_VECTOR_BITS 256
#include "layer_kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // __x86_64__

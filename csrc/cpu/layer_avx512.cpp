// A single layer's kernels for AVX-512.
#if defined(__x86_64__)
#include <immintrin.h>

#include <type_traits>

#include "layer.h"
#include "stage.h"

// Only code below this line may use the instruction set, and all of it lives in a namespace of its own: no function the
// linker could share with another translation unit is compiled for it.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2")
#endif

#if !defined(__clang__)
// GCC 12's intrinsics start from a register left undefined on purpose, and its warning then names its own header.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#define WNFUSED_ISA avx512
#define WNFUSED_VECTOR_BITS 512
#include "layer_kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // __x86_64__

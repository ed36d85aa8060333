// Opens the part of a translation unit that is compiled for AVX-512 with AVX512_BF16, up to target_end.h; see
// target_avx2.h. WNFUSED_ISA, the namespace, is the includer's.
#pragma once

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,bmi2"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,bmi2")
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#define WNFUSED_VECTOR_BITS 512
#define WNFUSED_CONVERTS_BFLOAT16 1

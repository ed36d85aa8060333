// Opens the part of a translation unit that is compiled for AVX-512, up to target_end.h; see target_avx2.h.
#pragma once

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2")
// GCC 12's intrinsics start from a register left undefined on purpose, and its warning then names its own header.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#define WNFUSED_ISA avx512
#define WNFUSED_VECTOR_BITS 512

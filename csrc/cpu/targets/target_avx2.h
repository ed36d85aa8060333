// Opens the part of a translation unit that is compiled for AVX2 + FMA, up to target_end.h. Every other header comes
// before it: only what follows may use the instruction set, and all of that lives in a namespace of its own, so that
// the linker shares no function compiled for it with other translation units.
#pragma once

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi2")
#endif

#define WNFUSED_ISA avx2
#define WNFUSED_VECTOR_BITS 256

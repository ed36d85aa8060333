// Blocks of 16 channels in float or bfloat16 memory, and the last, partial one of a run. Included once per instruction
// set, as vec.h is.
#pragma once

#include "vec.h"

namespace wnfused::cpu::WNFUSED_ISA {

typedef uint16_t NativeHalf __attribute__((vector_size(WNFUSED_VECTOR_BITS / 16)));

WNFUSED_INLINE Block load(const uint16_t* source) {
  Block block;
  WNFUSED_FOR_PARTS {
    NativeHalf half;
    __builtin_memcpy(&half, source + i * kNativeLanes, sizeof half);
    block.part[i] = (Native)(__builtin_convertvector(half, NativeBits) << 16);
  }
  return block;
}

WNFUSED_INLINE void store(uint16_t* target, const Block& block) {
  const Block rounded = round_to_bfloat16(block);
  WNFUSED_FOR_PARTS {
    const NativeHalf half = __builtin_convertvector((NativeBits)rounded.part[i] >> 16, NativeHalf);
    __builtin_memcpy(target + i * kNativeLanes, &half, sizeof half);
  }
}

// The first `count` < 16 entries; the others read as 0.
template <class T>
WNFUSED_INLINE Block load(const T* source, int64_t count) {
  T entries[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) entries[i] = source[i];
  return load(entries);
}

template <class T>
WNFUSED_INLINE void store(T* target, const Block& block, int64_t count) {
  T entries[kLanes];
  store(entries, block);
  for (int64_t i = 0; i < count; ++i) target[i] = entries[i];
}

// The sum of the lanes, halves first: the tree of horizontal_sum(), in registers.
WNFUSED_INLINE float sum_of(const Block& a) {
#if WNFUSED_VECTOR_BITS == 512
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a.part[0]), _mm512_extractf32x8_ps(a.part[0], 1));
#elif WNFUSED_VECTOR_BITS == 256
  const __m256 half = _mm256_add_ps(a.part[0], a.part[1]);
#else
  return horizontal_sum(a);
#endif
#if WNFUSED_VECTOR_BITS > 128
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
#endif
}

// body(i, move) over a run of `length` entries, where `move` loads and stores a whole or the last, partial block.
struct Whole {
  template <class T>
  WNFUSED_INLINE Block load(const T* source) const { return WNFUSED_ISA::load(source); }
  template <class T>
  WNFUSED_INLINE void store(T* target, const Block& block) const { WNFUSED_ISA::store(target, block); }
};

struct Partial {
  int64_t count;
  template <class T>
  WNFUSED_INLINE Block load(const T* source) const { return WNFUSED_ISA::load(source, count); }
  template <class T>
  WNFUSED_INLINE void store(T* target, const Block& block) const { WNFUSED_ISA::store(target, block, count); }
};

template <class Body>
WNFUSED_INLINE void for_blocks(int64_t length, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= length; i += kLanes) body(i, Whole{});
  if (i < length) body(i, Partial{length - i});
}

// visit(pointer) with the entries' own type.
template <class Visit>
WNFUSED_INLINE void with_entries(const Values& values, const Visit& visit) {
  if (values.bfloat16) visit(static_cast<uint16_t*>(values.data));
  else visit(static_cast<float*>(values.data));
}

}  // namespace wnfused::cpu::WNFUSED_ISA

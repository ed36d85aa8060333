// Blocks of 16 channels in float or bfloat16 memory, and the last, partial one of a run. Included once per instruction
// set, as vec.h is.
#pragma once

#include "cpu/vec/vec.h"

namespace wnfused::cpu::WNFUSED_ISA {

// 16 doubles, with the words that a Block has.
typedef double NativeDouble __attribute__((vector_size(WNFUSED_VECTOR_BITS / 8)));
constexpr int kDoubleParts = 2 * kParts;

struct Doubles {
  NativeDouble part[kDoubleParts];
};

#define WNFUSED_FOR_DOUBLES WNFUSED_UNROLL for (int i = 0; i < kDoubleParts; ++i)

WNFUSED_INLINE Doubles load(const double* source) {
  Doubles block;
  WNFUSED_FOR_DOUBLES __builtin_memcpy(&block.part[i], source + i * (kNativeLanes / 2), sizeof(NativeDouble));
  return block;
}

WNFUSED_INLINE void store(double* target, const Doubles& block) {
  WNFUSED_FOR_DOUBLES __builtin_memcpy(target + i * (kNativeLanes / 2), &block.part[i], sizeof(NativeDouble));
}

WNFUSED_INLINE Doubles operator+(const Doubles& a, const Doubles& b) {
  Doubles sum;
  WNFUSED_FOR_DOUBLES sum.part[i] = a.part[i] + b.part[i];
  return sum;
}

WNFUSED_INLINE Doubles operator-(const Doubles& a, const Doubles& b) {
  Doubles difference;
  WNFUSED_FOR_DOUBLES difference.part[i] = a.part[i] - b.part[i];
  return difference;
}

WNFUSED_INLINE Doubles operator*(const Doubles& a, const Doubles& b) {
  Doubles product;
  WNFUSED_FOR_DOUBLES product.part[i] = a.part[i] * b.part[i];
  return product;
}

WNFUSED_INLINE Doubles multiply_add(const Doubles& a, const Doubles& b, const Doubles& c) {
  Doubles result;
  WNFUSED_FOR_DOUBLES result.part[i] = a.part[i] * b.part[i] + c.part[i];
  return result;
}

WNFUSED_INLINE double sum_of(const Doubles& a) {
  double lanes[kLanes];
  store(lanes, a);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

// value, or 0 where `key` is 0.
WNFUSED_INLINE Block where_not_zero(const Block& key, const Block& value) {
  const Native nothing{};
  Block result;
  WNFUSED_FOR_PARTS result.part[i] = key.part[i] == nothing ? nothing : value.part[i];
  return result;
}

WNFUSED_INLINE Doubles where_not_zero(const Doubles& key, const Doubles& value) {
  const NativeDouble nothing{};
  Doubles result;
  WNFUSED_FOR_DOUBLES result.part[i] = key.part[i] == nothing ? nothing : value.part[i];
  return result;
}

// The block that entries of type T are worked on in.
template <class T>
struct BlockFor {
  using type = Block;
};
template <>
struct BlockFor<double> {
  using type = Doubles;
};
template <class T>
using BlockOf = typename BlockFor<T>::type;

template <class B>
WNFUSED_INLINE B splat_of(double value) {
  if constexpr (std::is_same_v<B, Doubles>) {
    Doubles block;
    WNFUSED_FOR_DOUBLES block.part[i] = value - NativeDouble{};
    return block;
  } else {
    return splat(static_cast<float>(value));
  }
}

template <class B>
WNFUSED_INLINE B zero_of() {
  return splat_of<B>(0);
}

// The first `count` < 16 entries; the others read as 0.
template <class T>
WNFUSED_INLINE BlockOf<T> load(const T* source, int64_t count) {
  T entries[kLanes] = {};
  __builtin_memcpy(entries, source, count * sizeof(T));  // a pair of bfloat16 taken for a float may lie at any address
  return load(entries);
}

template <class T>
WNFUSED_INLINE void store(T* target, const BlockOf<T>& block, int64_t count) {
  T entries[kLanes];
  store(entries, block);
  __builtin_memcpy(target, entries, count * sizeof(T));
}

template <class T>
WNFUSED_INLINE void store_exact(T* target, const Block& block, int64_t count) {
  T entries[kLanes];
  store_exact(entries, block);
  __builtin_memcpy(target, entries, count * sizeof(T));
}

#if WNFUSED_VECTOR_BITS == 512
// In registers, where the memory above costs a store that the load has to wait for.
WNFUSED_INLINE __mmask16 mask_of(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }

WNFUSED_INLINE Block load(const float* source, int64_t count) {
  return {{(Native)_mm512_maskz_loadu_ps(mask_of(count), source)}};
}

WNFUSED_INLINE Block load(const uint16_t* source, int64_t count) {
  const NativeHalf half = (NativeHalf)_mm256_maskz_loadu_epi16(mask_of(count), source);
  return {{(Native)(extended(half) << 16)}};
}

WNFUSED_INLINE void store(float* target, const Block& block, int64_t count) {
  _mm512_mask_storeu_ps(target, mask_of(count), (__m512)block.part[0]);
}
#elif WNFUSED_VECTOR_BITS == 256
WNFUSED_INLINE __m256i mask_of(int64_t count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

WNFUSED_INLINE Block load(const float* source, int64_t count) {
  return {{(Native)_mm256_maskload_ps(source, mask_of(count)),
           (Native)_mm256_maskload_ps(source + kNativeLanes, mask_of(count - kNativeLanes))}};
}

// By halves of what is left, as a masked store is a program of dozens of instructions on some processors. A run's last
// block has as many entries as the last one of the run before, mostly: the branches are foreseen.
WNFUSED_INLINE void store(float* target, const Block& block, int64_t count) {
  __m256 rest = (__m256)block.part[0];
  if (count >= 8) {
    _mm256_storeu_ps(target, rest);
    rest = (__m256)block.part[1];
    target += 8;
    if (count == 16) return _mm256_storeu_ps(target, rest);
  }
  __m128 last = _mm256_castps256_ps128(rest);
  if (count & 4) {
    _mm_storeu_ps(target, last);
    last = _mm256_extractf128_ps(rest, 1);
    target += 4;
  }
  if (count & 2) {
    _mm_storel_pi(reinterpret_cast<__m64*>(target), last);
    last = _mm_movehl_ps(last, last);
    target += 2;
  }
  if (count & 1) _mm_store_ss(target, last);
}
#endif

// Lanes [0, first) from `a`, lanes [first, count) from `b`, each at its own number; the others are 0.
WNFUSED_INLINE Block load_two(const float* a, int64_t first, const float* b, int64_t count) {
#if WNFUSED_VECTOR_BITS == 512
  const __m512 part = _mm512_maskz_loadu_ps(mask_of(first), a);
  return {{(Native)_mm512_mask_loadu_ps(part, mask_of(count) & ~mask_of(first), b)}};
#else
  float entries[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) entries[i] = i < first ? a[i] : b[i];
  return load(entries);
#endif
}

WNFUSED_INLINE void store_two(float* a, int64_t first, float* b, int64_t count, const Block& block) {
#if WNFUSED_VECTOR_BITS == 512
  _mm512_mask_storeu_ps(a, mask_of(first), (__m512)block.part[0]);
  _mm512_mask_storeu_ps(b, mask_of(count) & ~mask_of(first), (__m512)block.part[0]);
#else
  float entries[kLanes];
  store(entries, block);
  for (int64_t i = 0; i < count; ++i) (i < first ? a : b)[i] = entries[i];
#endif
}

struct Whole {
  template <class T>
  WNFUSED_INLINE BlockOf<T> load(const T* source) const { return WNFUSED_ISA::load(source); }
  template <class T>
  WNFUSED_INLINE void store(T* target, const BlockOf<T>& block) const { WNFUSED_ISA::store(target, block); }
  template <class T>
  WNFUSED_INLINE void store_exact(T* target, const Block& block) const { WNFUSED_ISA::store_exact(target, block); }
};

struct Partial {
  int64_t count;
  template <class T>
  WNFUSED_INLINE BlockOf<T> load(const T* source) const { return WNFUSED_ISA::load(source, count); }
  template <class T>
  WNFUSED_INLINE void store(T* target, const BlockOf<T>& block) const { WNFUSED_ISA::store(target, block, count); }
  template <class T>
  WNFUSED_INLINE void store_exact(T* target, const Block& block) const {
    WNFUSED_ISA::store_exact(target, block, count);
  }
};

// body(i, move) over a run of `length` entries, where `move` loads and stores a whole or the last, partial block.
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

// A block of 16 channels as the kernels see it.
//
//   Block = 16 floats = | 1 x 512 bit |  or | 2 x 256 bit |  or | 4 x 128 bit |
//                          avx512              avx2               portable
//
// Every layout is made of 16-channel blocks, whatever the width of the machine's vectors, so that the
// kernels are written once, against Block, and only the register tile (how many Blocks of accumulators fit) differs.
// Vectors are those of the GCC/Clang vector extension; an intrinsic appears only where the extension has no word for
// the instruction (fused multiply-add, shuffles).
//
// Each translation unit is of one instruction set: it defines WNFUSED_ISA (the namespace) and WNFUSED_VECTOR_BITS
// (target_<isa>.h), and includes the kernels once.
#pragma once

#include "cpu/vec/lanes.h"

#define WNFUSED_INLINE inline __attribute__((always_inline))
#define WNFUSED_UNROLL _Pragma("GCC unroll 16")
#define WNFUSED_ROLLED _Pragma("GCC unroll 1")

namespace wnfused::cpu::WNFUSED_ISA {

constexpr int kNativeLanes = WNFUSED_VECTOR_BITS / 32;
constexpr int kParts = kLanes / kNativeLanes;

typedef float Native __attribute__((vector_size(WNFUSED_VECTOR_BITS / 8)));
typedef int32_t NativeInt __attribute__((vector_size(WNFUSED_VECTOR_BITS / 8)));
typedef uint32_t NativeBits __attribute__((vector_size(WNFUSED_VECTOR_BITS / 8)));
typedef uint16_t NativeHalf __attribute__((vector_size(WNFUSED_VECTOR_BITS / 16)));
typedef int16_t NativeShort __attribute__((vector_size(WNFUSED_VECTOR_BITS / 8)));

struct Block {
  Native part[kParts];
};

// The first half of one, where that is whole vectors.
struct HalfBlock {
  Native part[kParts > 1 ? kParts / 2 : 1];
};
template <class B>
constexpr int kPartsOf = sizeof(B) / sizeof(Native);

WNFUSED_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
WNFUSED_INLINE int64_t greater(int64_t a, int64_t b) { return a < b ? b : a; }

WNFUSED_INLINE Native native_splat(float value) {
#if WNFUSED_VECTOR_BITS == 512
  return _mm512_set1_ps(value);
#elif WNFUSED_VECTOR_BITS == 256
  return _mm256_set1_ps(value);
#else
  return Native{value, value, value, value};
#endif
}

WNFUSED_INLINE Native native_multiply_add(Native a, Native b, Native c) {
#if WNFUSED_VECTOR_BITS == 512
  return _mm512_fmadd_ps(a, b, c);
#elif WNFUSED_VECTOR_BITS == 256
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

WNFUSED_INLINE Native load_native(const float* source) {
  Native vector;
  __builtin_memcpy(&vector, source, sizeof vector);
  return vector;
}

WNFUSED_INLINE void store_native(float* target, const Native& vector) {
  __builtin_memcpy(target, &vector, sizeof vector);
}

#define WNFUSED_FOR_PARTS WNFUSED_UNROLL for (int i = 0; i < kParts; ++i)

WNFUSED_INLINE Block load(const float* source) {
  Block block;
  WNFUSED_FOR_PARTS block.part[i] = load_native(source + i * kNativeLanes);
  return block;
}

template <class B>
WNFUSED_INLINE B load_as(const float* source) {
  B block;
  WNFUSED_UNROLL for (int i = 0; i < kPartsOf<B>; ++i) block.part[i] = load_native(source + i * kNativeLanes);
  return block;
}

WNFUSED_INLINE void store(float* target, const Block& block) {
  WNFUSED_FOR_PARTS store_native(target + i * kNativeLanes, block.part[i]);
}

WNFUSED_INLINE bool is_aligned(const float* target) { return reinterpret_cast<uintptr_t>(target) % sizeof(Block) == 0; }

// A store that leaves the caches alone where the processor has one; other threads need not see it before
// end_stores_past_caches(). The target is a multiple of a Block's 64 bytes.
WNFUSED_INLINE void store_past_caches(float* target, const Block& block) {
#if WNFUSED_VECTOR_BITS == 512
  _mm512_stream_ps(target, (__m512)block.part[0]);
#elif WNFUSED_VECTOR_BITS == 256
  WNFUSED_FOR_PARTS _mm256_stream_ps(target + i * kNativeLanes, (__m256)block.part[i]);
#else
  store(target, block);
#endif
}

WNFUSED_INLINE void end_stores_past_caches() {
#if WNFUSED_VECTOR_BITS >= 256
  _mm_sfence();
#endif
}

WNFUSED_INLINE Block splat(float value) {
  Block block;
  WNFUSED_FOR_PARTS block.part[i] = native_splat(value);
  return block;
}

WNFUSED_INLINE Block zero() { return splat(0.0f); }

WNFUSED_INLINE Block operator+(const Block& a, const Block& b) {
  Block sum;
  WNFUSED_FOR_PARTS sum.part[i] = a.part[i] + b.part[i];
  return sum;
}

WNFUSED_INLINE Block operator-(const Block& a, const Block& b) {
  Block difference;
  WNFUSED_FOR_PARTS difference.part[i] = a.part[i] - b.part[i];
  return difference;
}

WNFUSED_INLINE Block operator-(const Block& a) {
  Block negated;
  WNFUSED_FOR_PARTS negated.part[i] = -a.part[i];
  return negated;
}

WNFUSED_INLINE Block operator*(const Block& a, const Block& b) {
  Block product;
  WNFUSED_FOR_PARTS product.part[i] = a.part[i] * b.part[i];
  return product;
}

// a * b + c
WNFUSED_INLINE Block multiply_add(const Block& a, const Block& b, const Block& c) {
  Block result;
  WNFUSED_FOR_PARTS result.part[i] = native_multiply_add(a.part[i], b.part[i], c.part[i]);
  return result;
}

// The same for a Block or its half, and one number in all lanes.
template <class B>
WNFUSED_INLINE B multiply_add(const Native& a, const B& b, const B& c) {
  B result;
  WNFUSED_UNROLL for (int i = 0; i < kPartsOf<B>; ++i) result.part[i] = native_multiply_add(a, b.part[i], c.part[i]);
  return result;
}

// The sum of two halves, and zeros behind it.
WNFUSED_INLINE Block whole_of(const HalfBlock& a, const HalfBlock& b) {
  Block whole = zero();
  WNFUSED_UNROLL for (int i = 0; i < kPartsOf<HalfBlock>; ++i) whole.part[i] = a.part[i] + b.part[i];
  return whole;
}

// max(a, 0), where NaN stays NaN as in torch.relu (a hardware max returns its second operand instead).
WNFUSED_INLINE Block relu(const Block& a) {
  const Native nothing{};
  Block result;
  WNFUSED_FOR_PARTS result.part[i] = a.part[i] <= nothing ? nothing : a.part[i];
  return result;
}

// gradient where the activation passed the ReLU, 0 elsewhere; a NaN activation passes, as in torch.
WNFUSED_INLINE Block relu_mask(const Block& activation, const Block& gradient) {
  const Native nothing{};
  Block result;
  WNFUSED_FOR_PARTS result.part[i] = activation.part[i] <= nothing ? nothing : gradient.part[i];
  return result;
}

// gradient where the activation is above 0, slope * gradient elsewhere; a NaN activation counts as negative in a leaky
// ReLU, as in torch. Of the activation's own argument in the place of `gradient` it is the leaky ReLU.
WNFUSED_INLINE Block leaky_mask(const Block& activation, const Block& gradient, const Block& slope) {
  const Native nothing{};
  Block result;
  WNFUSED_FOR_PARTS result.part[i] =
      activation.part[i] > nothing ? gradient.part[i] : slope.part[i] * gradient.part[i];
  return result;
}

// a / b, 0 where b is.
WNFUSED_INLINE float ratio(float a, float b) { return b != 0.0f ? a / b : 0.0f; }

WNFUSED_INLINE Block ratio(const Block& a, const Block& b) {
  Block result;
  WNFUSED_FOR_PARTS result.part[i] = b.part[i] != 0.0f ? a.part[i] / b.part[i] : Native{};
  return result;
}

WNFUSED_INLINE Block square_root(const Block& a) {
  float entries[kLanes];
  store(entries, a);
  for (float& entry : entries) entry = __builtin_sqrtf(entry);
  return load(entries);
}

// Nearest bfloat16, ties to even, still held as fp32; NaN stays a (quiet) NaN.
WNFUSED_INLINE Native native_round_to_bfloat16(const Native& a) {
  const NativeBits bits = (NativeBits)a;
  const NativeBits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  const NativeBits quiet = (bits | 0x00400000u) & 0xffff0000u;
  const NativeInt is_number = a == a;
  return is_number ? (Native)rounded : (Native)quiet;
}

WNFUSED_INLINE Block round_to_bfloat16(const Block& a) {
  Block result;
  WNFUSED_FOR_PARTS result.part[i] = native_round_to_bfloat16(a.part[i]);
  return result;
}

WNFUSED_INLINE float from_bfloat16(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  __builtin_memcpy(&result, &bits, sizeof result);
  return result;
}

WNFUSED_INLINE uint16_t to_bfloat16(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  if (value != value) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Words zero-extended, and their low halves. GCC takes __builtin_convertvector apart into four times the instructions.
#if WNFUSED_VECTOR_BITS == 512
WNFUSED_INLINE NativeBits extended(NativeHalf half) { return (NativeBits)_mm512_cvtepu16_epi32((__m256i)half); }
WNFUSED_INLINE NativeHalf low_halves(NativeBits bits) { return (NativeHalf)_mm512_cvtepi32_epi16((__m512i)bits); }
#elif WNFUSED_VECTOR_BITS == 256
WNFUSED_INLINE NativeBits extended(NativeHalf half) { return (NativeBits)_mm256_cvtepu16_epi32((__m128i)half); }
WNFUSED_INLINE NativeHalf low_halves(NativeBits bits) { return __builtin_convertvector(bits, NativeHalf); }
#else
WNFUSED_INLINE NativeBits extended(NativeHalf half) { return __builtin_convertvector(half, NativeBits); }
WNFUSED_INLINE NativeHalf low_halves(NativeBits bits) { return __builtin_convertvector(bits, NativeHalf); }
#endif

WNFUSED_INLINE Block load(const uint16_t* source) {
  Block block;
  WNFUSED_FOR_PARTS {
    NativeHalf half;
    __builtin_memcpy(&half, source + i * kNativeLanes, sizeof half);
    block.part[i] = (Native)(extended(half) << 16);
  }
  return block;
}

WNFUSED_INLINE void store(uint16_t* target, const Block& block) {
#if defined(WNFUSED_CONVERTS_BFLOAT16)
  // The instruction takes denormals for zero.
  constexpr int kDenormal = 0x20;
  if (__builtin_expect(_mm512_fpclass_ps_mask(block.part[0], kDenormal) == 0, 1)) {
    const __m256i converted = (__m256i)_mm512_cvtneps_pbh(block.part[0]);
    __builtin_memcpy(target, &converted, sizeof converted);
    return;
  }
#endif
  const Block rounded = round_to_bfloat16(block);
  WNFUSED_FOR_PARTS {
    const NativeHalf half = low_halves((NativeBits)rounded.part[i] >> 16);
    __builtin_memcpy(target + i * kNativeLanes, &half, sizeof half);
  }
}

// The same for numbers that are bfloat16 already.
WNFUSED_INLINE void store_exact(uint16_t* target, const Block& block) {
  WNFUSED_FOR_PARTS {
    const NativeHalf half = low_halves((NativeBits)block.part[i] >> 16);
    __builtin_memcpy(target + i * kNativeLanes, &half, sizeof half);
  }
}

WNFUSED_INLINE void store_exact(float* target, const Block& block) { store(target, block); }

// The sums of halves, of quarters and so on, in that order for every width of vectors.
WNFUSED_INLINE float sum_of(const Block& a) {
#if WNFUSED_VECTOR_BITS > 128
#if WNFUSED_VECTOR_BITS == 512
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.part[0]), 1));
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.part[0]), high);
#else
  const __m256 eight = _mm256_add_ps(a.part[0], a.part[1]);
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  float lanes[kLanes];
  store(lanes, a);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
}

// Lane i is sum_of(r[i]).
WNFUSED_INLINE Block sums_of(const Block (&r)[kLanes]) {
#if WNFUSED_VECTOR_BITS == 512
  __m512 halves[8], quarters[4], eighths[2];
  WNFUSED_UNROLL for (int i = 0; i < 8; ++i) {
    const __m512 a = r[2 * i].part[0], b = r[2 * i + 1].part[0];
    halves[i] = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
  }
  WNFUSED_UNROLL for (int i = 0; i < 4; ++i) {
    const __m512 a = halves[2 * i], b = halves[2 * i + 1];
    quarters[i] = _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
  }
  WNFUSED_UNROLL for (int i = 0; i < 2; ++i) {
    const __m512 a = quarters[2 * i], b = quarters[2 * i + 1];
    eighths[i] = _mm512_shuffle_ps(a, b, 0x44) + _mm512_shuffle_ps(a, b, 0xee);
  }
  const __m512 sums = _mm512_shuffle_ps(eighths[0], eighths[1], 0x88) + _mm512_shuffle_ps(eighths[0], eighths[1], 0xdd);
  // Every four holds one of every four of r.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return {{(Native)_mm512_permutexvar_ps(order, sums)}};
#elif WNFUSED_VECTOR_BITS == 256
  Block sums;
  WNFUSED_UNROLL for (int part = 0; part < 2; ++part) {
    __m256 quarters[4], eighths[2];
    WNFUSED_UNROLL for (int i = 0; i < 4; ++i) {
      const Block &a = r[8 * part + 2 * i], &b = r[8 * part + 2 * i + 1];
      const __m256 half_a = a.part[0] + a.part[1], half_b = b.part[0] + b.part[1];
      quarters[i] = _mm256_permute2f128_ps(half_a, half_b, 0x20) + _mm256_permute2f128_ps(half_a, half_b, 0x31);
    }
    WNFUSED_UNROLL for (int i = 0; i < 2; ++i) {
      const __m256 a = quarters[2 * i], b = quarters[2 * i + 1];
      eighths[i] = _mm256_shuffle_ps(a, b, 0x44) + _mm256_shuffle_ps(a, b, 0xee);
    }
    const __m256 mixed =
        _mm256_shuffle_ps(eighths[0], eighths[1], 0x88) + _mm256_shuffle_ps(eighths[0], eighths[1], 0xdd);
    sums.part[part] = (Native)_mm256_permutevar8x32_ps(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  return sums;
#else
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = sum_of(r[i]);
  return load(lanes);
#endif
}

// r[i][j] <-> r[j][i]
WNFUSED_INLINE void transpose(Block (&r)[kLanes]) {
#if WNFUSED_VECTOR_BITS == 512
  __m512 t[16];
  WNFUSED_UNROLL for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i].part[0], r[2 * i + 1].part[0]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i].part[0], r[2 * i + 1].part[0]);
  }
  __m512 u[16];
  WNFUSED_UNROLL for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(t[4 * i]), b = _mm512_castps_pd(t[4 * i + 1]);
    const __m512d c = _mm512_castps_pd(t[4 * i + 2]), d = _mm512_castps_pd(t[4 * i + 3]);
    u[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    u[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    u[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    u[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
  WNFUSED_UNROLL for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(u[i], u[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(u[i], u[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0xdd);
  }
  WNFUSED_UNROLL for (int i = 0; i < 8; ++i) {
    r[i].part[0] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 8].part[0] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
  }
#elif WNFUSED_VECTOR_BITS == 256
  // Four squares of eight by eight, of which two change places.
  Block flipped[kLanes];
  WNFUSED_UNROLL for (int square = 0; square < 4; ++square) {
    const int top = square / 2 * 8, part = square % 2;
    __m256 t[8], u[8];
    WNFUSED_UNROLL for (int i = 0; i < 4; ++i) {
      t[2 * i] = _mm256_unpacklo_ps(r[top + 2 * i].part[part], r[top + 2 * i + 1].part[part]);
      t[2 * i + 1] = _mm256_unpackhi_ps(r[top + 2 * i].part[part], r[top + 2 * i + 1].part[part]);
    }
    WNFUSED_UNROLL for (int i = 0; i < 2; ++i) {
      u[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
      u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
      u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
      u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    WNFUSED_UNROLL for (int i = 0; i < 4; ++i) {
      flipped[part * 8 + i].part[top / 8] = (Native)_mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
      flipped[part * 8 + i + 4].part[top / 8] = (Native)_mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
  }
  WNFUSED_UNROLL for (int i = 0; i < kLanes; ++i) r[i] = flipped[i];
#else
  float tile[kLanes][kLanes];
  for (int i = 0; i < kLanes; ++i) store(tile[i], r[i]);
  float flipped[kLanes][kLanes];
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kLanes; ++j) flipped[j][i] = tile[i][j];
  for (int i = 0; i < kLanes; ++i) r[i] = load(flipped[i]);
#endif
}

// Columns of 16 rows of four floats, `stride` apart: those from kFirst on. Quarters of a vector are loaded row by row,
// so that half of a transposition's shuffles are none.
template <int kFirst = 0>
WNFUSED_INLINE void load_columns(const float* source, int64_t stride, Block* columns) {
#if WNFUSED_VECTOR_BITS == 512
  __m512 rows[4];
  WNFUSED_UNROLL for (int j = 0; j < 4; ++j) {
    const float* row = source + j * stride;
    rows[j] = _mm512_castps128_ps512(_mm_loadu_ps(row));
    rows[j] = _mm512_insertf32x4(rows[j], _mm_loadu_ps(row + 4 * stride), 1);
    rows[j] = _mm512_insertf32x4(rows[j], _mm_loadu_ps(row + 8 * stride), 2);
    rows[j] = _mm512_insertf32x4(rows[j], _mm_loadu_ps(row + 12 * stride), 3);
  }
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(rows[0], rows[1]));
  const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(rows[0], rows[1]));
  const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(rows[2], rows[3]));
  const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(rows[2], rows[3]));
  const __m512d found[4] = {_mm512_unpacklo_pd(a, c), _mm512_unpackhi_pd(a, c), _mm512_unpacklo_pd(b, d),
                            _mm512_unpackhi_pd(b, d)};
  WNFUSED_UNROLL for (int i = kFirst; i < 4; ++i) columns[i - kFirst].part[0] = (Native)_mm512_castpd_ps(found[i]);
#elif WNFUSED_VECTOR_BITS == 256
  WNFUSED_UNROLL for (int part = 0; part < kParts; ++part, source += kNativeLanes * stride) {
    __m256 rows[4];
    WNFUSED_UNROLL for (int j = 0; j < 4; ++j) {
      const float* row = source + j * stride;
      rows[j] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row)), _mm_loadu_ps(row + 4 * stride), 1);
    }
    const __m256 a = _mm256_unpacklo_ps(rows[0], rows[1]), b = _mm256_unpackhi_ps(rows[0], rows[1]);
    const __m256 c = _mm256_unpacklo_ps(rows[2], rows[3]), d = _mm256_unpackhi_ps(rows[2], rows[3]);
    const __m256 found[4] = {_mm256_shuffle_ps(a, c, 0x44), _mm256_shuffle_ps(a, c, 0xee),
                             _mm256_shuffle_ps(b, d, 0x44), _mm256_shuffle_ps(b, d, 0xee)};
    WNFUSED_UNROLL for (int i = kFirst; i < 4; ++i) columns[i - kFirst].part[part] = (Native)found[i];
  }
#else
  float entries[4 - kFirst][kLanes];
  for (int r = 0; r < kLanes; ++r)
    for (int i = kFirst; i < 4; ++i) entries[i - kFirst][r] = source[r * stride + i];
  for (int i = kFirst; i < 4; ++i) columns[i - kFirst] = load(entries[i - kFirst]);
#endif
}

}  // namespace wnfused::cpu::WNFUSED_ISA

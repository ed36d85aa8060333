// The three kinds of operands. Each says how values stand in shared memory, what one 16-byte row of a fragment holds,
// and how fragments are multiplied; sums are fp32 in all of them.
//
//   Bfloat16   values rounded to bf16 when stored; one HMMA a product
//   Tf32       fp32 rounded to tf32 (10 bits of mantissa) when stored; one HMMA a product
//   Float32    fp32; each fragment is split into tf32 + tf32 when loaded, and a product is three HMMA: what is left out
//              is the product of the two small parts, 2^-22 of the whole. Matrix instructions round their sums toward
//              zero, which over hundreds of them costs fp32 its last five bits; so the three add up from zero, and an
//              addition of fp32's own takes them to the running sum (Ootomo & Yokota 2022, arXiv 2203.03341)
#pragma once

#include "cuda/target.h"

namespace wnfused::gpu {

enum class Precision { kBfloat16, kTf32, kFloat32 };

struct Bfloat16 {
  static constexpr Precision kPrecision = Precision::kBfloat16;
  static constexpr int kBytes = 2;
  static constexpr bool kIsBfloat16 = true;
  static constexpr int kVector = 8;  // values in 16 bytes
  static constexpr int kDepth = 16;  // of one product

  using Pair = uint32_t;  // two neighbouring values as they are stored
  WNFUSED_DEVICE static Pair pack(float low, float high) { return pack_bf16(low, high); }

  // Of both values what is positive or NaN, and zero for the rest.
  WNFUSED_DEVICE static Pair pack_rectified(float low, float high) { return pack_rectified_bf16(low, high); }

  // Of such a pair: bit 0 where the low value is not zero, bit 16 where the high one is not.
  WNFUSED_DEVICE static uint32_t are_positive(Pair pair) { return (pair + 0x7fff7fffu) >> 15 & 0x10001u; }

  struct Fragment {
    uint32_t value[4];
  };
  WNFUSED_DEVICE static Fragment fragment(const uint32_t (&raw)[4]) { return {{raw[0], raw[1], raw[2], raw[3]}}; }

  // sum += a b, where `b` holds two tiles of 8 columns and `tile` picks one.
  WNFUSED_DEVICE static void multiply(float (&sum)[4], const Fragment& a, const Fragment& b, int tile) {
    multiply_bf16(sum, a.value, b.value[2 * tile], b.value[2 * tile + 1]);
  }
};

struct Tf32 {
  static constexpr Precision kPrecision = Precision::kTf32;
  static constexpr int kBytes = 4;
  static constexpr bool kIsBfloat16 = false;
  static constexpr int kVector = 4;
  static constexpr int kDepth = 8;

  using Pair = FloatPair;
  WNFUSED_DEVICE static Pair pack(float low, float high) { return {round_to_tf32(low), round_to_tf32(high)}; }
  WNFUSED_DEVICE static Pair pack_rectified(float low, float high) { return pack(rectified(low), rectified(high)); }
  WNFUSED_DEVICE static uint32_t are_positive(Pair pair) {
    return (pair.low != 0.0f ? 1u : 0u) | (pair.high != 0.0f ? 0x10000u : 0u);
  }

  using Fragment = Bfloat16::Fragment;
  WNFUSED_DEVICE static Fragment fragment(const uint32_t (&raw)[4]) { return Bfloat16::fragment(raw); }
  WNFUSED_DEVICE static void multiply(float (&sum)[4], const Fragment& a, const Fragment& b, int tile) {
    multiply_tf32(sum, a.value, b.value[2 * tile], b.value[2 * tile + 1]);
  }
};

struct Float32 {
  static constexpr Precision kPrecision = Precision::kFloat32;
  static constexpr int kBytes = 4;
  static constexpr bool kIsBfloat16 = false;
  static constexpr int kVector = 4;
  static constexpr int kDepth = 8;

  using Pair = FloatPair;
  WNFUSED_DEVICE static Pair pack(float low, float high) { return {low, high}; }
  WNFUSED_DEVICE static Pair pack_rectified(float low, float high) { return pack(rectified(low), rectified(high)); }
  WNFUSED_DEVICE static uint32_t are_positive(Pair pair) {
    return (pair.low != 0.0f ? 1u : 0u) | (pair.high != 0.0f ? 0x10000u : 0u);
  }

  struct Fragment {
    uint32_t large[4], small[4];
  };
  WNFUSED_DEVICE static Fragment fragment(const uint32_t (&raw)[4]) {
    Fragment split;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float value = float_of_bits(raw[i]), large = round_to_tf32(value), rest = value - large;
      split.large[i] = bits_of_float(large);
      // An infinity has no rest: infinity - infinity would make NaN of it.
      split.small[i] = bits_of_float(rest == rest ? round_to_tf32(rest) : 0.0f);
    }
    return split;
  }
  WNFUSED_DEVICE static void multiply(float (&sum)[4], const Fragment& a, const Fragment& b, int tile) {
    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    multiply_tf32(part, a.small, b.large[2 * tile], b.large[2 * tile + 1]);
    multiply_tf32(part, a.large, b.small[2 * tile], b.small[2 * tile + 1]);
    multiply_tf32(part, a.large, b.large[2 * tile], b.large[2 * tile + 1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += part[i];
  }
};

}  // namespace wnfused::gpu

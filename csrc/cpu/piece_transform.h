// Winograd's F(4, 4) over one dim and its transposes, on Blocks (16 channels at a time): four outputs of a filter of four
// taps by seven multiplications instead of sixteen.
//
//   Y  = A' [ (G g) . (B' d) ]        four outputs from seven inputs d and four taps g
//   dg = G' [ (A y) . (B' d) ]        the same trilinear form read for the filter
//
// The matrices evaluate and interpolate polynomials at +-1/4, +-7/8, +-2 and at infinity (Toom and Cook). Of all points
// that are multiples of 1/8 these round least: 1.7 times a direct sum's error (bench/winograd_error.py). B' has row
// prod over the other points (x - p), G what that leaves of Lagrange's denominators.
//
// With a point r and its negative, even and odd parts are shared: p(r) = e + r o, p(-r) = e - r o.
#pragma once

#include "stage_winograd.h"

namespace wnfused::cpu::WNFUSED_ISA {

class PieceTransform {
 public:
  static constexpr int kOutputs = 4, kTaps = 4, kInputs = kOutputs + kTaps - 1;

  static WNFUSED_INLINE Blocks<kInputs> input(const Blocks<kInputs>& d) {
    Blocks<kInputs> result;
    WNFUSED_UNROLL for (int i = 0; i < kPairs; ++i) {
      const float sum = square((i + 1) % kPairs) + square((i + 2) % kPairs);
      const float product = square((i + 1) % kPairs) * square((i + 2) % kPairs);
      const Block odd = times_add(product, d.at[1], times_add(-sum, d.at[3], d.at[5]));
      const Block even = times_add(product, d.at[0], times_add(-sum, d.at[2], d.at[4]));
      result.at[2 * i] = times_add(kPoint[i], even, odd);
      result.at[2 * i + 1] = times_add(-kPoint[i], even, odd);
    }
    const float sum = square(0) + square(1) + square(2), product = square(0) * square(1) * square(2);
    const float pairs = square(0) * square(1) + square(1) * square(2) + square(2) * square(0);
    result.at[6] = times_add(-product, d.at[0], times_add(pairs, d.at[2], times_add(-sum, d.at[4], d.at[6])));
    return result;
  }

  static WNFUSED_INLINE Blocks<kOutputs> output(const Blocks<kInputs>& m) {
    Block sum[kPairs], difference[kPairs];
    WNFUSED_UNROLL for (int i = 0; i < kPairs; ++i) {
      sum[i] = m.at[2 * i] + m.at[2 * i + 1];
      difference[i] = (m.at[2 * i] - m.at[2 * i + 1]) * splat(kPoint[i]);
    }
    return {{sum[0] + (sum[1] + sum[2]), difference[0] + (difference[1] + difference[2]),
             times_add(square(2), sum[2], times_add(square(1), sum[1], sum[0] * splat(square(0)))),
             times_add(square(2), difference[2],
                       times_add(square(1), difference[1], times_add(square(0), difference[0], m.at[6])))}};
  }

  static WNFUSED_INLINE Blocks<kInputs> filter(const Blocks<kTaps>& g) {
    Blocks<kInputs> result;
    WNFUSED_UNROLL for (int i = 0; i < kPairs; ++i) {
      const Block even = times_add(square(i), g.at[2], g.at[0]) * splat(scale(i));
      const Block odd = times_add(square(i), g.at[3], g.at[1]) * splat(scale(i) * kPoint[i]);
      result.at[2 * i] = odd + even;
      result.at[2 * i + 1] = odd - even;
    }
    result.at[6] = g.at[3];
    return result;
  }

  static WNFUSED_INLINE Blocks<kInputs> gradient(const Blocks<kOutputs>& y) {
    Blocks<kInputs> result;
    WNFUSED_UNROLL for (int i = 0; i < kPairs; ++i) {
      const Block even = times_add(square(i), y.at[2], y.at[0]), odd = times_add(square(i), y.at[3], y.at[1]);
      result.at[2 * i] = times_add(kPoint[i], odd, even);
      result.at[2 * i + 1] = times_add(-kPoint[i], odd, even);
    }
    result.at[6] = y.at[3];
    return result;
  }

  static WNFUSED_INLINE Blocks<kTaps> filter_gradient(const Blocks<kInputs>& m) {
    Blocks<kTaps> result{{zero(), zero(), zero(), m.at[6]}};
    WNFUSED_UNROLL for (int i = 0; i < kPairs; ++i) {
      const Block even = (m.at[2 * i] - m.at[2 * i + 1]) * splat(scale(i));
      const Block odd = (m.at[2 * i] + m.at[2 * i + 1]) * splat(scale(i) * kPoint[i]);
      result.at[0] = result.at[0] + even;
      result.at[1] = result.at[1] + odd;
      result.at[2] = times_add(square(i), even, result.at[2]);
      result.at[3] = times_add(square(i), odd, result.at[3]);
    }
    return result;
  }

 private:
  static constexpr int kPairs = 3;
  static constexpr float kPoint[kPairs] = {0.25f, 0.875f, 2.0f};

  static constexpr float square(int i) { return kPoint[i] * kPoint[i]; }

  // 1 / product of the differences to the other points; of a point's negative the same with the other sign.
  static constexpr float scale(int i) {
    float product = 2.0f * kPoint[i];
    for (int j = 0; j < kPairs; ++j)
      if (j != i) product *= square(i) - square(j);
    return 1.0f / product;
  }

  static WNFUSED_INLINE Block times_add(float factor, const Block& a, const Block& b) {
    return multiply_add(splat(factor), a, b);
  }
};

}  // namespace wnfused::cpu::WNFUSED_ISA

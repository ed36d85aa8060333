// Winograd's method over one dim: F(4, Taps) and its transposes, on one native vector of channels at a time. Four
// outputs of a filter of `Taps` taps cost Taps + 3 multiplications instead of 4 Taps.
//
//   Y  = A' [ (G g) . (B' d) ]        four outputs from the inputs d and the taps g
//   dg = G' [ (A y) . (B' d) ]        the same trilinear form read for the filter
//
// The matrices evaluate and interpolate polynomials (Toom and Cook) at infinity and at
//
//   3 taps    0, +-5/8, +-3/2             6 multiplications instead of 12
//   4 taps    +-1/4, +-7/8, +-2           7 instead of 16
//   5 taps    0, +-1/2, +-1, +-2          8 instead of 20
//
// of the sets tried those that round least: 2 to 3.2 times the error of a direct sum (bench/winograd_error.py). B' has
// the row prod (x - other points) for each point, G what that leaves of Lagrange's denominators.
//
// With a point r and its negative, even and odd parts are shared: p(r) = e + r o, p(-r) = e - r o.
#pragma once

#include "cpu/conv3x3/winograd.h"

namespace wnfused::cpu::WNFUSED_ISA {

template <int Taps>
struct PieceTransform;

// One dim of F(4x4, 3x3).
template <>
struct PieceTransform<3> : Winograd<4> {};

// Three points and their negatives.
class ThreePairs {
 protected:
  static constexpr int kPairs = 3;

  // The points' squares: sums of their products.
  struct Squares {
    float point[kPairs];

    constexpr float of(int i) const { return point[i] * point[i]; }
    constexpr float sum() const { return of(0) + of(1) + of(2); }
    constexpr float pairs() const { return of(0) * of(1) + of(1) * of(2) + of(2) * of(0); }
    constexpr float product() const { return of(0) * of(1) * of(2); }
    // The same of the two other points.
    constexpr float other_sum(int i) const { return of((i + 1) % kPairs) + of((i + 2) % kPairs); }
    constexpr float other_product(int i) const { return of((i + 1) % kPairs) * of((i + 2) % kPairs); }
    // 1 / product of the differences to the other points, but for 0, whose factor is the point itself.
    constexpr float scale(int i) const {
      return 1.0f / (2.0f * point[i] * (of(i) - of((i + 1) % kPairs)) * (of(i) - of((i + 2) % kPairs)));
    }
  };

  // (x^2 - q^2) (x^2 - r^2) by the coefficients a, b, c, q and r being the points other than i.
  static WNFUSED_INLINE Native others(const Squares& at, int i, const Native& a, const Native& b, const Native& c) {
    return times_add(at.other_product(i), a, times_add(-at.other_sum(i), b, c));
  }

  // (x^2 - p^2) (x^2 - q^2) (x^2 - r^2) by the coefficients a, b, c, d.
  static WNFUSED_INLINE Native all(const Squares& at, const Native& a, const Native& b, const Native& c,
                                   const Native& d) {
    return times_add(-at.product(), a, times_add(at.pairs(), b, times_add(-at.sum(), c, d)));
  }

  // Four outputs of the pairs' products, which begin at `m`; infinity's is added to the last one.
  static WNFUSED_INLINE Vectors<4> pair_outputs(const Squares& at, const Native* m, const Native& infinite) {
    Native sum[kPairs], difference[kPairs];
    WNFUSED_UNROLL for (int i = 0; i < kPairs; ++i) {
      sum[i] = m[2 * i] + m[2 * i + 1];
      difference[i] = (m[2 * i] - m[2 * i + 1]) * at.point[i];
    }
    return {{sum[0] + (sum[1] + sum[2]), difference[0] + (difference[1] + difference[2]),
             times_add(at.of(2), sum[2], times_add(at.of(1), sum[1], sum[0] * at.of(0))),
             times_add(at.of(2), difference[2],
                       times_add(at.of(1), difference[1], times_add(at.of(0), difference[0], infinite)))}};
  }

  // A y of the pairs, to `target`.
  static WNFUSED_INLINE void pair_gradients(const Squares& at, const Vectors<4>& y, Native* target) {
    WNFUSED_UNROLL for (int i = 0; i < kPairs; ++i) {
      const Native even = times_add(at.of(i), y.at[2], y.at[0]), odd = times_add(at.of(i), y.at[3], y.at[1]);
      target[2 * i] = times_add(at.point[i], odd, even);
      target[2 * i + 1] = times_add(-at.point[i], odd, even);
    }
  }
};

template <>
struct PieceTransform<4> : ThreePairs {
  static constexpr Squares kAt = {{0.25f, 0.875f, 2.0f}};

  static WNFUSED_INLINE Vectors<7> input(const Vectors<7>& d) {
    Vectors<7> result;
    WNFUSED_UNROLL for (int i = 0; i < kPairs; ++i) {
      const Native odd = others(kAt, i, d.at[1], d.at[3], d.at[5]), even = others(kAt, i, d.at[0], d.at[2], d.at[4]);
      result.at[2 * i] = times_add(kAt.point[i], even, odd);
      result.at[2 * i + 1] = times_add(-kAt.point[i], even, odd);
    }
    result.at[6] = all(kAt, d.at[0], d.at[2], d.at[4], d.at[6]);
    return result;
  }

  static WNFUSED_INLINE Vectors<4> output(const Vectors<7>& m) { return pair_outputs(kAt, m.at, m.at[6]); }

  static WNFUSED_INLINE Vectors<7> filter(const Vectors<4>& g) {
    Vectors<7> result;
    WNFUSED_UNROLL for (int i = 0; i < kPairs; ++i) {
      const float scale = kAt.scale(i);
      const Native even = times_add(kAt.of(i), g.at[2], g.at[0]) * scale;
      const Native odd = times_add(kAt.of(i), g.at[3], g.at[1]) * (scale * kAt.point[i]);
      result.at[2 * i] = odd + even;
      result.at[2 * i + 1] = odd - even;
    }
    result.at[6] = g.at[3];
    return result;
  }

  static WNFUSED_INLINE Vectors<7> gradient(const Vectors<4>& y) {
    Vectors<7> result;
    pair_gradients(kAt, y, result.at);
    result.at[6] = y.at[3];
    return result;
  }

  static WNFUSED_INLINE Vectors<4> filter_gradient(const Vectors<7>& m) {
    Vectors<4> result{{{}, {}, {}, m.at[6]}};
    WNFUSED_UNROLL for (int i = 0; i < kPairs; ++i) {
      const float scale = kAt.scale(i);
      const Native even = (m.at[2 * i] - m.at[2 * i + 1]) * scale;
      const Native odd = (m.at[2 * i] + m.at[2 * i + 1]) * (scale * kAt.point[i]);
      result.at[0] = result.at[0] + even;
      result.at[1] = result.at[1] + odd;
      result.at[2] = times_add(kAt.of(i), even, result.at[2]);
      result.at[3] = times_add(kAt.of(i), odd, result.at[3]);
    }
    return result;
  }
};

template <>
struct PieceTransform<5> : ThreePairs {
  static constexpr Squares kAt = {{0.5f, 1.0f, 2.0f}};

  static WNFUSED_INLINE Vectors<8> input(const Vectors<8>& d) {
    Vectors<8> result;
    WNFUSED_UNROLL for (int i = 0; i < kPairs; ++i) {
      const Native even = others(kAt, i, d.at[2], d.at[4], d.at[6]), odd = others(kAt, i, d.at[1], d.at[3], d.at[5]);
      result.at[2 * i] = times_add(kAt.point[i], odd, even);
      result.at[2 * i + 1] = times_add(-kAt.point[i], odd, even);
    }
    result.at[6] = all(kAt, d.at[0], d.at[2], d.at[4], d.at[6]);
    result.at[7] = all(kAt, d.at[1], d.at[3], d.at[5], d.at[7]);
    return result;
  }

  static WNFUSED_INLINE Vectors<4> output(const Vectors<8>& m) {
    Vectors<4> result = pair_outputs(kAt, m.at, m.at[7]);
    result.at[0] = result.at[0] + m.at[6];
    return result;
  }

  static WNFUSED_INLINE Vectors<8> filter(const Vectors<5>& g) {
    Vectors<8> result;
    WNFUSED_UNROLL for (int i = 0; i < kPairs; ++i) {
      const float scale = kAt.scale(i);
      const Native even = times_add(kAt.of(i), times_add(kAt.of(i), g.at[4], g.at[2]), g.at[0]);
      const Native odd = times_add(kAt.of(i), g.at[3], g.at[1]) * scale;
      const Native scaled = even * (scale / kAt.point[i]);
      result.at[2 * i] = scaled + odd;
      result.at[2 * i + 1] = scaled - odd;
    }
    result.at[6] = g.at[0] * (-1.0f / kAt.product());
    result.at[7] = g.at[4];
    return result;
  }

  static WNFUSED_INLINE Vectors<8> gradient(const Vectors<4>& y) {
    Vectors<8> result;
    pair_gradients(kAt, y, result.at);
    result.at[6] = y.at[0];
    result.at[7] = y.at[3];
    return result;
  }

  static WNFUSED_INLINE Vectors<5> filter_gradient(const Vectors<8>& m) {
    Vectors<5> result{{m.at[6] * (-1.0f / kAt.product()), Native{}, Native{}, Native{}, m.at[7]}};
    WNFUSED_UNROLL for (int i = 0; i < kPairs; ++i) {
      const float scale = kAt.scale(i);
      const Native even = (m.at[2 * i] + m.at[2 * i + 1]) * (scale / kAt.point[i]);
      const Native odd = (m.at[2 * i] - m.at[2 * i + 1]) * scale;
      const Native squared = even * kAt.of(i);
      result.at[0] = result.at[0] + even;
      result.at[1] = result.at[1] + odd;
      result.at[2] = result.at[2] + squared;
      result.at[3] = times_add(kAt.of(i), odd, result.at[3]);
      result.at[4] = times_add(kAt.of(i), squared, result.at[4]);
    }
    return result;
  }
};

}  // namespace wnfused::cpu::WNFUSED_ISA

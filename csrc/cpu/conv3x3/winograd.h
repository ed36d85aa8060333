// Winograd's F(MxM, 3x3) for M = 2 and 4 and its transposes, on Blocks (16 channels at a time).
//
//   Y  = A' [ (G g G') . (B' d B) ] A        an MxM output tile from an (M+2)x(M+2) input patch d and a 3x3 filter g
//   dg = G' [ (A y A') . (B' d B) ] G        the same trilinear form read for the filter: the weight gradient of an
//                                            MxM tile y of output gradients
//
// The matrices evaluate and interpolate polynomials at M + 1 points and at infinity (Toom and Cook):
//
//   M = 2: 0, 1, -1            16 multiplications a tile instead of 36; every constant is a power of two
//   M = 4: 0, +-5/8, +-3/2     36 instead of 144. The points usual for it, 0, +-1, +-2, lose twice as much: pairs
//                              whose product is near 1 keep the powers near 1, and with these the constants of B' and A
//                              are exact (errors: bench/winograd_error.py)
//
// With a point r and its negative, even and odd parts are shared: p(r) = e + r o, p(-r) = e - r o.
//
// Lavin and Gray, Fast Algorithms for Convolutional Neural Networks (2016), section 4.1; the choice of points as in
// Barabasz, Anderson, Soodhalter and Gregg, Error Analysis and Improving the Accuracy of Winograd Convolution for DNNs
// (2020).
#pragma once

#include "cpu/vec/vec.h"

namespace wnfused::cpu::WNFUSED_ISA {

template <int N>
struct Blocks {
  Block at[N];
};

template <int M>
struct Winograd;

template <>
struct Winograd<2> {
  static constexpr int kPatch = 4;

  static WNFUSED_INLINE Blocks<4> input(const Blocks<4>& d) {
    return {{d.at[0] - d.at[2], d.at[1] + d.at[2], d.at[2] - d.at[1], d.at[1] - d.at[3]}};
  }

  static WNFUSED_INLINE Blocks<2> output(const Blocks<4>& m) {
    return {{m.at[0] + (m.at[1] + m.at[2]), (m.at[1] - m.at[2]) - m.at[3]}};
  }

  static WNFUSED_INLINE Blocks<4> filter(const Blocks<3>& g) {
    const Block half = splat(0.5f);
    const Block even = (g.at[0] + g.at[2]) * half, odd = g.at[1] * half;
    return {{g.at[0], even + odd, even - odd, g.at[2]}};
  }

  static WNFUSED_INLINE Blocks<4> gradient(const Blocks<2>& y) {
    return {{y.at[0], y.at[0] + y.at[1], y.at[0] - y.at[1], -y.at[1]}};
  }

  static WNFUSED_INLINE Blocks<3> filter_gradient(const Blocks<4>& m) {
    const Block half = splat(0.5f);
    const Block sum = (m.at[1] + m.at[2]) * half;
    return {{m.at[0] + sum, (m.at[1] - m.at[2]) * half, sum + m.at[3]}};
  }
};

template <>
struct Winograd<4> {
  static constexpr int kPatch = 6;

  static constexpr float kP = 0.625f, kQ = 1.5f;
  static constexpr float kP2 = kP * kP, kQ2 = kQ * kQ;
  // 1 / product of the differences to the other points; the same for a point and its negative.
  static constexpr float kScale0 = 1.0f / (kP2 * kQ2);
  static constexpr float kScaleP = 1.0f / (2.0f * kP2 * (kP2 - kQ2));
  static constexpr float kScaleQ = 1.0f / (2.0f * kQ2 * (kQ2 - kP2));

  static WNFUSED_INLINE Block times_add(float factor, const Block& a, const Block& b) {
    return multiply_add(splat(factor), a, b);
  }

  static WNFUSED_INLINE Blocks<6> input(const Blocks<6>& d) {
    const Block even_p = times_add(-kQ2, d.at[2], d.at[4]), odd_p = times_add(-kQ2, d.at[1], d.at[3]);
    const Block even_q = times_add(-kP2, d.at[2], d.at[4]), odd_q = times_add(-kP2, d.at[1], d.at[3]);
    return {{times_add(kP2 * kQ2, d.at[0], times_add(-(kP2 + kQ2), d.at[2], d.at[4])),
             times_add(kP, odd_p, even_p), times_add(-kP, odd_p, even_p),
             times_add(kQ, odd_q, even_q), times_add(-kQ, odd_q, even_q),
             times_add(kP2 * kQ2, d.at[1], times_add(-(kP2 + kQ2), d.at[3], d.at[5]))}};
  }

  static WNFUSED_INLINE Blocks<4> output(const Blocks<6>& m) {
    const Block sum_p = m.at[1] + m.at[2], difference_p = m.at[1] - m.at[2];
    const Block sum_q = m.at[3] + m.at[4], difference_q = m.at[3] - m.at[4];
    return {{m.at[0] + (sum_p + sum_q),
             times_add(kQ, difference_q, difference_p * splat(kP)),
             times_add(kQ2, sum_q, sum_p * splat(kP2)),
             times_add(kQ2 * kQ, difference_q, times_add(kP2 * kP, difference_p, m.at[5]))}};
  }

  static WNFUSED_INLINE Blocks<6> filter(const Blocks<3>& g) {
    const Block even_p = times_add(kP2, g.at[2], g.at[0]) * splat(kScaleP), odd_p = g.at[1] * splat(kScaleP * kP);
    const Block even_q = times_add(kQ2, g.at[2], g.at[0]) * splat(kScaleQ), odd_q = g.at[1] * splat(kScaleQ * kQ);
    return {{g.at[0] * splat(kScale0), even_p + odd_p, even_p - odd_p, even_q + odd_q, even_q - odd_q, g.at[2]}};
  }

  static WNFUSED_INLINE Blocks<6> gradient(const Blocks<4>& y) {
    const Block even_p = times_add(kP2, y.at[2], y.at[0]), odd_p = times_add(kP2, y.at[3], y.at[1]);
    const Block even_q = times_add(kQ2, y.at[2], y.at[0]), odd_q = times_add(kQ2, y.at[3], y.at[1]);
    return {{y.at[0], times_add(kP, odd_p, even_p), times_add(-kP, odd_p, even_p),
             times_add(kQ, odd_q, even_q), times_add(-kQ, odd_q, even_q), y.at[3]}};
  }

  static WNFUSED_INLINE Blocks<3> filter_gradient(const Blocks<6>& m) {
    const Block sum_p = (m.at[1] + m.at[2]) * splat(kScaleP), sum_q = (m.at[3] + m.at[4]) * splat(kScaleQ);
    return {{times_add(kScale0, m.at[0], sum_p + sum_q),
             times_add(kScaleP * kP, m.at[1] - m.at[2], (m.at[3] - m.at[4]) * splat(kScaleQ * kQ)),
             times_add(kP2, sum_p, times_add(kQ2, sum_q, m.at[5]))}};
  }
};

template <int M>
using Patch = Blocks<Winograd<M>::kPatch>;

// One column of B' d: d is 16 channels of the patch's pixels one below the other, a line each.
template <int M, bool Round>
WNFUSED_INLINE Patch<M> input_column(const float* const (&lines)[M + 2], int64_t offset) {
  Patch<M> column;
  WNFUSED_UNROLL for (int i = 0; i < M + 2; ++i) {
    column.at[i] = load(lines[i] + offset);
    if constexpr (Round) column.at[i] = round_to_bfloat16(column.at[i]);
  }
  return Winograd<M>::input(column);
}

// Row i of (B' d) B from the columns of B' d; a position goes to the next multiple of the stride.
template <int M>
WNFUSED_INLINE void input_transform_row(float* const (&columns)[M + 2], int64_t i, float* target, int64_t stride) {
  Patch<M> row;
  WNFUSED_UNROLL for (int j = 0; j < M + 2; ++j) row.at[j] = load(columns[j] + i * kLanes);
  row = Winograd<M>::input(row);
  WNFUSED_UNROLL for (int j = 0; j < M + 2; ++j) store(target + j * stride, row.at[j]);
}

// A' m A: the output tile of a product, position p at source + p * stride; tile[row][column].
template <int M>
WNFUSED_INLINE void output_transform(const float* source, int64_t stride, Block (&tile)[M][M]) {
  constexpr int kPatch = M + 2;
  Blocks<M> columns[kPatch];
  WNFUSED_UNROLL for (int j = 0; j < kPatch; ++j) {
    Patch<M> column;
    WNFUSED_UNROLL for (int i = 0; i < kPatch; ++i) column.at[i] = load(source + (kPatch * i + j) * stride);
    columns[j] = Winograd<M>::output(column);
  }
  WNFUSED_UNROLL for (int i = 0; i < M; ++i) {
    Patch<M> row;
    WNFUSED_UNROLL for (int j = 0; j < kPatch; ++j) row.at[j] = columns[j].at[i];
    const Blocks<M> out = Winograd<M>::output(row);
    WNFUSED_UNROLL for (int j = 0; j < M; ++j) tile[i][j] = out.at[j];
  }
}

// G g G'. tap(k) is the Block of tap k = 3 * row + column.
template <int M, class TapAt>
WNFUSED_INLINE void filter_transform(const TapAt& tap, float* target, int64_t stride) {
  constexpr int kPatch = M + 2;
  Patch<M> columns[3];
  WNFUSED_UNROLL for (int j = 0; j < 3; ++j)
    columns[j] = Winograd<M>::filter(Blocks<3>{{tap(j), tap(3 + j), tap(6 + j)}});
  WNFUSED_UNROLL for (int i = 0; i < kPatch; ++i) {
    const Patch<M> row =
        Winograd<M>::filter(Blocks<3>{{columns[0].at[i], columns[1].at[i], columns[2].at[i]}});
    WNFUSED_UNROLL for (int j = 0; j < kPatch; ++j) store(target + (kPatch * i + j) * stride, row.at[j]);
  }
}

// A y A'
template <int M>
WNFUSED_INLINE void gradient_transform(const Block (&y)[M][M], float* target, int64_t stride) {
  constexpr int kPatch = M + 2;
  Patch<M> columns[M];
  WNFUSED_UNROLL for (int j = 0; j < M; ++j) {
    Blocks<M> column;
    WNFUSED_UNROLL for (int i = 0; i < M; ++i) column.at[i] = y[i][j];
    columns[j] = Winograd<M>::gradient(column);
  }
  WNFUSED_UNROLL for (int i = 0; i < kPatch; ++i) {
    Blocks<M> row;
    WNFUSED_UNROLL for (int j = 0; j < M; ++j) row.at[j] = columns[j].at[i];
    const Patch<M> out = Winograd<M>::gradient(row);
    WNFUSED_UNROLL for (int j = 0; j < kPatch; ++j) store(target + (kPatch * i + j) * stride, out.at[j]);
  }
}

// G' m G: position p at source + p * source_stride, tap k goes to target + k * stride.
template <int M>
WNFUSED_INLINE void filter_gradient(const float* source, int64_t source_stride, float* target, int64_t stride) {
  constexpr int kPatch = M + 2;
  Blocks<3> columns[kPatch];
  WNFUSED_UNROLL for (int j = 0; j < kPatch; ++j) {
    Patch<M> column;
    WNFUSED_UNROLL for (int i = 0; i < kPatch; ++i) column.at[i] = load(source + (kPatch * i + j) * source_stride);
    columns[j] = Winograd<M>::filter_gradient(column);
  }
  WNFUSED_UNROLL for (int i = 0; i < 3; ++i) {
    Patch<M> row;
    WNFUSED_UNROLL for (int j = 0; j < kPatch; ++j) row.at[j] = columns[j].at[i];
    const Blocks<3> taps = Winograd<M>::filter_gradient(row);
    WNFUSED_UNROLL for (int j = 0; j < 3; ++j) store(target + (3 * i + j) * stride, taps.at[j]);
  }
}

}  // namespace wnfused::cpu::WNFUSED_ISA

// Winograd's F(MxM, 3x3) for M = 2 and 4 and its transposes, on one native vector of channels at a time: a patch of
// six and what becomes of it are all that fits the registers where a Block is two vectors.
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

#include <utility>

#include "cpu/vec/vec.h"

namespace wnfused::cpu::WNFUSED_ISA {

template <int N>
struct Vectors {
  Native at[N];
};

template <class At, int... I>
WNFUSED_INLINE Vectors<sizeof...(I)> vectors_of(const At& at, std::integer_sequence<int, I...>) {
  return {{at(I)...}};
}

// at(0), .., at(N - 1). Not by a loop: GCC 12 unrolls one too late to keep what it indexes in registers.
template <int N, class At>
WNFUSED_INLINE Vectors<N> vectors_of(const At& at) {
  return vectors_of(at, std::make_integer_sequence<int, N>());
}

template <class Run, int... I>
WNFUSED_INLINE void for_each_of(const Run& run, std::integer_sequence<int, I...>) {
  (run(I), ...);
}

// run(0), .., run(N - 1), in the same way.
template <int N, class Run>
WNFUSED_INLINE void for_each_of(const Run& run) {
  for_each_of(run, std::make_integer_sequence<int, N>());
}

// Vector i at source + i * stride, and the other way.
template <int N>
WNFUSED_INLINE Vectors<N> load_vectors(const float* source, int64_t stride) {
  return vectors_of<N>([&](int i) __attribute__((always_inline)) { return load_native(source + i * stride); });
}

template <int N, int... I>
WNFUSED_INLINE void store_vectors(float* target, int64_t stride, const Vectors<N>& vectors,
                                  std::integer_sequence<int, I...>) {
  (store_native(target + I * stride, vectors.at[I]), ...);
}

template <int N>
WNFUSED_INLINE void store_vectors(float* target, int64_t stride, const Vectors<N>& vectors) {
  store_vectors(target, stride, vectors, std::make_integer_sequence<int, N>());
}

WNFUSED_INLINE Native sum_of(const Vectors<2>& vectors) { return vectors.at[0] + vectors.at[1]; }

WNFUSED_INLINE Native sum_of(const Vectors<4>& vectors) {
  return (vectors.at[0] + vectors.at[1]) + (vectors.at[2] + vectors.at[3]);
}

WNFUSED_INLINE Native times_add(float factor, const Native& a, const Native& b) {
  return native_multiply_add(native_splat(factor), a, b);
}

template <int M>
struct Winograd;

template <>
struct Winograd<2> {
  static constexpr int kPatch = 4;

  static WNFUSED_INLINE Vectors<4> input(const Vectors<4>& d) {
    return {{d.at[0] - d.at[2], d.at[1] + d.at[2], d.at[2] - d.at[1], d.at[1] - d.at[3]}};
  }

  static WNFUSED_INLINE Vectors<2> output(const Vectors<4>& m) {
    return {{m.at[0] + (m.at[1] + m.at[2]), (m.at[1] - m.at[2]) - m.at[3]}};
  }

  static WNFUSED_INLINE Vectors<4> filter(const Vectors<3>& g) {
    const Native even = (g.at[0] + g.at[2]) * 0.5f, odd = g.at[1] * 0.5f;
    return {{g.at[0], even + odd, even - odd, g.at[2]}};
  }

  static WNFUSED_INLINE Vectors<4> gradient(const Vectors<2>& y) {
    return {{y.at[0], y.at[0] + y.at[1], y.at[0] - y.at[1], -y.at[1]}};
  }

  static WNFUSED_INLINE Vectors<3> filter_gradient(const Vectors<4>& m) {
    const Native sum = (m.at[1] + m.at[2]) * 0.5f;
    return {{m.at[0] + sum, (m.at[1] - m.at[2]) * 0.5f, sum + m.at[3]}};
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

  static WNFUSED_INLINE Vectors<6> input(const Vectors<6>& d) {
    const Native even_p = times_add(-kQ2, d.at[2], d.at[4]), odd_p = times_add(-kQ2, d.at[1], d.at[3]);
    const Native even_q = times_add(-kP2, d.at[2], d.at[4]), odd_q = times_add(-kP2, d.at[1], d.at[3]);
    return {{times_add(kP2 * kQ2, d.at[0], times_add(-(kP2 + kQ2), d.at[2], d.at[4])),
             times_add(kP, odd_p, even_p), times_add(-kP, odd_p, even_p),
             times_add(kQ, odd_q, even_q), times_add(-kQ, odd_q, even_q),
             times_add(kP2 * kQ2, d.at[1], times_add(-(kP2 + kQ2), d.at[3], d.at[5]))}};
  }

  static WNFUSED_INLINE Vectors<4> output(const Vectors<6>& m) {
    const Native sum_p = m.at[1] + m.at[2], difference_p = m.at[1] - m.at[2];
    const Native sum_q = m.at[3] + m.at[4], difference_q = m.at[3] - m.at[4];
    return {{m.at[0] + (sum_p + sum_q),
             times_add(kQ, difference_q, difference_p * kP),
             times_add(kQ2, sum_q, sum_p * kP2),
             times_add(kQ2 * kQ, difference_q, times_add(kP2 * kP, difference_p, m.at[5]))}};
  }

  static WNFUSED_INLINE Vectors<6> filter(const Vectors<3>& g) {
    const Native even_p = times_add(kP2, g.at[2], g.at[0]) * kScaleP, odd_p = g.at[1] * (kScaleP * kP);
    const Native even_q = times_add(kQ2, g.at[2], g.at[0]) * kScaleQ, odd_q = g.at[1] * (kScaleQ * kQ);
    return {{g.at[0] * kScale0, even_p + odd_p, even_p - odd_p, even_q + odd_q, even_q - odd_q, g.at[2]}};
  }

  static WNFUSED_INLINE Vectors<6> gradient(const Vectors<4>& y) {
    const Native even_p = times_add(kP2, y.at[2], y.at[0]), odd_p = times_add(kP2, y.at[3], y.at[1]);
    const Native even_q = times_add(kQ2, y.at[2], y.at[0]), odd_q = times_add(kQ2, y.at[3], y.at[1]);
    return {{y.at[0], times_add(kP, odd_p, even_p), times_add(-kP, odd_p, even_p),
             times_add(kQ, odd_q, even_q), times_add(-kQ, odd_q, even_q), y.at[3]}};
  }

  static WNFUSED_INLINE Vectors<3> filter_gradient(const Vectors<6>& m) {
    const Native sum_p = (m.at[1] + m.at[2]) * kScaleP, sum_q = (m.at[3] + m.at[4]) * kScaleQ;
    return {{times_add(kScale0, m.at[0], sum_p + sum_q),
             times_add(kScaleP * kP, m.at[1] - m.at[2], (m.at[3] - m.at[4]) * (kScaleQ * kQ)),
             times_add(kP2, sum_p, times_add(kQ2, sum_q, m.at[5]))}};
  }
};

template <int M>
using Patch = Vectors<Winograd<M>::kPatch>;

// One column of B' d: d is 16 channels of the patch's pixels one below the other, a line each.
template <int M, bool Round>
WNFUSED_INLINE void input_column(const float* const (&lines)[M + 2], int64_t offset, float* column) {
  for (int part = 0; part < kLanes; part += kNativeLanes) {
    const auto pixels = vectors_of<M + 2>([&](int i) __attribute__((always_inline)) {
      const Native pixel = load_native(lines[i] + offset + part);
      return Round ? native_round_to_bfloat16(pixel) : pixel;
    });
    store_vectors(column + part, kLanes, Winograd<M>::input(pixels));
  }
}

// A row of (B' d) B from those columns, of which `columns` is that row of the first; a position goes to the next
// multiple of the stride.
template <int M>
WNFUSED_INLINE void input_transform_row(const float* columns, float* target, int64_t stride) {
  for (int part = 0; part < kLanes; part += kNativeLanes)
    store_vectors(target + part, stride,
                  Winograd<M>::input(load_vectors<M + 2>(columns + part, (M + 2) * kLanes)));
}

// A' m A: the output tile of a product, position p at source + p * stride. finish(y, row) takes it row by row.
// Unrolled, the rows would all be under way at once, and spilled, and sixteen epilogues be more code than a first-level
// cache holds.
template <int M, class Finish>
WNFUSED_INLINE void output_transform(const float* source, int64_t stride, const Finish& finish) {
  constexpr int kPatch = M + 2;
  alignas(64) float columns[M][kPatch * kLanes];
  WNFUSED_ROLLED for (int j = 0; j < kPatch; ++j) {
    WNFUSED_ROLLED for (int part = 0; part < kLanes; part += kNativeLanes)
      store_vectors(columns[0] + j * kLanes + part, kPatch * kLanes,
                    Winograd<M>::output(load_vectors<kPatch>(source + j * stride + part, kPatch * stride)));
  }
  WNFUSED_ROLLED for (int y = 0; y < M; ++y) {
    Block row[M];
    WNFUSED_FOR_PARTS {
      const Vectors<M> out = Winograd<M>::output(load_vectors<kPatch>(columns[y] + i * kNativeLanes, kLanes));
      WNFUSED_UNROLL for (int j = 0; j < M; ++j) row[j].part[i] = out.at[j];
    }
    finish(y, row);
  }
}

// G g G'. tap(k, part) is that part of the Block of tap k = 3 * row + column.
template <int M, class TapAt>
WNFUSED_INLINE void filter_transform(const TapAt& tap, float* target, int64_t stride) {
  constexpr int kPatch = M + 2;
  WNFUSED_FOR_PARTS {
    const auto column = [&](int j) __attribute__((always_inline)) {
      return Winograd<M>::filter(Vectors<3>{{tap(j, i), tap(3 + j, i), tap(6 + j, i)}});
    };
    const Patch<M> left = column(0), middle = column(1), right = column(2);
    const auto put_row = [&](int y) __attribute__((always_inline)) {
      store_vectors(target + i * kNativeLanes + kPatch * y * stride, stride,
                    Winograd<M>::filter(Vectors<3>{{left.at[y], middle.at[y], right.at[y]}}));
    };
    for_each_of<kPatch>(put_row);
  }
}

// A y A', and the sum of y to `sum`. pixel(row, column, lane) is a native vector of y from that lane on.
template <int M, class PixelAt>
WNFUSED_INLINE void gradient_transform(const PixelAt& pixel, float* target, int64_t stride, float* sum) {
  constexpr int kPatch = M + 2;
  for (int part = 0; part < kLanes; part += kNativeLanes) {
    Patch<M> columns[M];
    Native total = load_native(sum + part);
    for_each_of<M>([&](int j) __attribute__((always_inline)) {
      const auto column = vectors_of<M>([&](int y) __attribute__((always_inline)) { return pixel(y, j, part); });
      total = total + sum_of(column);
      columns[j] = Winograd<M>::gradient(column);
    });
    store_native(sum + part, total);
    for_each_of<kPatch>([&](int y) __attribute__((always_inline)) {
      const auto row = vectors_of<M>([&](int j) __attribute__((always_inline)) { return columns[j].at[y]; });
      store_vectors(target + part + kPatch * y * stride, stride, Winograd<M>::gradient(row));
    });
  }
}

// G' m G: position p at source + p * source_stride, tap k goes to target + k * stride.
template <int M>
WNFUSED_INLINE void filter_gradient(const float* source, int64_t source_stride, float* target, int64_t stride) {
  constexpr int kPatch = M + 2;
  for (int part = 0; part < kLanes; part += kNativeLanes) {
    Vectors<3> columns[kPatch];
    for_each_of<kPatch>([&](int j) __attribute__((always_inline)) {
      columns[j] = Winograd<M>::filter_gradient(
          load_vectors<kPatch>(source + part + j * source_stride, kPatch * source_stride));
    });
    for_each_of<3>([&](int k) __attribute__((always_inline)) {
      const auto row = vectors_of<kPatch>([&](int j) __attribute__((always_inline)) { return columns[j].at[k]; });
      store_vectors(target + part + 3 * k * stride, stride, Winograd<M>::filter_gradient(row));
    });
  }
}

}  // namespace wnfused::cpu::WNFUSED_ISA

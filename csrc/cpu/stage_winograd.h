// Winograd's F(2x2, 3x3) and its transpose, on Blocks (16 channels at a time).
//
//   Y  = A' [ (G g G') . (B' d B) ] A        a 2x2 output tile from a 4x4 input patch d and a 3x3 filter g
//   dg = G' [ (A y A') . (B' d B) ] G        the same trilinear form read for the filter: the weight gradient of a
//                                            2x2 tile y of output gradients
//
//        | 1  0 -1  0 |        | 1    0    0  |        | 1  0 |
//   B' = | 0  1  1  0 |    G = | 1/2  1/2  1/2|    A = | 1  1 |
//        | 0 -1  1  0 |        | 1/2 -1/2  1/2|        | 1 -1 |
//        | 0  1  0 -1 |        | 0    0    1  |        | 0 -1 |
//
// 16 multiplications a tile instead of 36; every constant is a power of two, so the transforms add rounding errors only.
// Lavin and Gray, Fast Algorithms for Convolutional Neural Networks (2016), section 4.1.
#pragma once

#include "vec.h"

namespace wnfused::cpu::WNFUSED_ISA {

struct Four {
  Block at[4];
};

WNFUSED_INLINE Four input_transform_1d(const Block& d0, const Block& d1, const Block& d2, const Block& d3) {
  return {{d0 - d2, d1 + d2, d2 - d1, d1 - d3}};
}

WNFUSED_INLINE Four filter_transform_1d(const Block& g0, const Block& g1, const Block& g2) {
  const Block half = splat(0.5f);
  const Block outer = (g0 + g2) * half;
  const Block inner = g1 * half;
  return {{g0, outer + inner, outer - inner, g2}};
}

WNFUSED_INLINE Four gradient_transform_1d(const Block& y0, const Block& y1) { return {{y0, y0 + y1, y0 - y1, -y1}}; }

// One column of B' d: d is 16 channels of four pixels, one below the other.
template <bool Round>
WNFUSED_INLINE Four input_column(const float* p0, const float* p1, const float* p2, const float* p3) {
  if constexpr (Round)
    return input_transform_1d(round_to_bfloat16(load(p0)), round_to_bfloat16(load(p1)), round_to_bfloat16(load(p2)),
                              round_to_bfloat16(load(p3)));
  return input_transform_1d(load(p0), load(p1), load(p2), load(p3));
}

// (B' d) B from the four columns of B' d; position p goes to target + p * stride.
WNFUSED_INLINE void input_transform_rows(const Four& c0, const Four& c1, const Four& c2, const Four& c3, float* target,
                                         int64_t stride) {
  WNFUSED_UNROLL for (int i = 0; i < 4; ++i) {
    const Four row = input_transform_1d(c0.at[i], c1.at[i], c2.at[i], c3.at[i]);
    WNFUSED_UNROLL for (int j = 0; j < 4; ++j) store(target + (4 * i + j) * stride, row.at[j]);
  }
}

// A' m A: the 2x2 output tile of 16 products, position p at source + p * stride.
WNFUSED_INLINE void output_transform(const float* source, int64_t stride, Block (&tile)[2][2]) {
  Block top[4], bottom[4];
  WNFUSED_UNROLL for (int j = 0; j < 4; ++j) {
    const Block m1 = load(source + (4 + j) * stride), m2 = load(source + (8 + j) * stride);
    top[j] = load(source + j * stride) + (m1 + m2);
    bottom[j] = (m1 - m2) - load(source + (12 + j) * stride);
  }
  tile[0][0] = top[0] + (top[1] + top[2]);
  tile[0][1] = (top[1] - top[2]) - top[3];
  tile[1][0] = bottom[0] + (bottom[1] + bottom[2]);
  tile[1][1] = (bottom[1] - bottom[2]) - bottom[3];
}

// G g G'. tap(k) is the Block of tap k = 3 * row + column.
template <class Tap>
WNFUSED_INLINE void filter_transform(const Tap& tap, float* target, int64_t stride) {
  Four column[3];
  WNFUSED_UNROLL for (int j = 0; j < 3; ++j) column[j] = filter_transform_1d(tap(j), tap(3 + j), tap(6 + j));
  WNFUSED_UNROLL for (int i = 0; i < 4; ++i) {
    const Four row = filter_transform_1d(column[0].at[i], column[1].at[i], column[2].at[i]);
    WNFUSED_UNROLL for (int j = 0; j < 4; ++j) store(target + (4 * i + j) * stride, row.at[j]);
  }
}

// A y A'
WNFUSED_INLINE void gradient_transform(const Block (&y)[2][2], float* target, int64_t stride) {
  const Four left = gradient_transform_1d(y[0][0], y[1][0]), right = gradient_transform_1d(y[0][1], y[1][1]);
  WNFUSED_UNROLL for (int i = 0; i < 4; ++i) {
    const Four row = gradient_transform_1d(left.at[i], right.at[i]);
    WNFUSED_UNROLL for (int j = 0; j < 4; ++j) store(target + (4 * i + j) * stride, row.at[j]);
  }
}

struct Three {
  Block at[3];
};

WNFUSED_INLINE Three filter_gradient_1d(const Block& m0, const Block& m1, const Block& m2, const Block& m3) {
  const Block half = splat(0.5f);
  const Block sum = (m1 + m2) * half;
  return {{m0 + sum, (m1 - m2) * half, sum + m3}};
}

// G' m G: position(p) is the Block of position p, tap k goes to target + k * kLanes.
template <class Position>
WNFUSED_INLINE void filter_gradient(const Position& position, float* target) {
  Three column[4];
  WNFUSED_UNROLL for (int j = 0; j < 4; ++j)
    column[j] = filter_gradient_1d(position(j), position(4 + j), position(8 + j), position(12 + j));
  WNFUSED_UNROLL for (int i = 0; i < 3; ++i) {
    const Three row =
        filter_gradient_1d(column[0].at[i], column[1].at[i], column[2].at[i], column[3].at[i]);
    WNFUSED_UNROLL for (int j = 0; j < 3; ++j) store(target + (3 * i + j) * kLanes, row.at[j]);
  }
}

}  // namespace wnfused::cpu::WNFUSED_ISA

// The whole linear layer for a handful of rows of x: v streams past x once, forward and backward.
//
//      forward    R rows of v x up to 8 rows of x, one Block of running sums a pair, and one a row of v for its norm
//
//                       k ->                      sum[r][m] += v[r][k] x[m][k]     R loads of v, M of x
//            v[r]  |----|----|----|               square[r] += v[r][k]^2           R M + R multiply-adds
//            x[m]  |----|----|----|
//
//      backward   R rows of v:  dw[r][k] = sum_m dz[m][r] x[m][k]        stays in L1 (it is dv's memory)
//                               dx[m][k] += sum_r s_r dz[m][r] v[r][k]   dx is the worker's own, in L2
//                               then dv[r] = s_r (dw[r] - v[r] <dw[r], v[r]> / ||v[r]||^2)
//
// Floor: v once; backward v once and dv once, which is what the un-normalised layer moves for dx and dw.
#pragma once

#include "layer_epilogue.h"
#include "layer_rows.h"

namespace wnfused::cpu::WNFUSED_ISA {

// What fits the register file beside the operands.
constexpr int kSumBlocks = kParts == 1 ? 18 : kParts == 2 ? 5 : 4;
constexpr int kMaxSmallTile = kParts == 1 ? 8 : 4;

template <int kRows, int kTile>
WNFUSED_INLINE void dot_tile(const float* v, const float* x, int64_t inner, float (&product)[kRows][kTile], float* square) {
  Block sum[kRows][kTile], norm[kRows];
  WNFUSED_UNROLL for (int r = 0; r < kRows; ++r) {
    norm[r] = zero();
    WNFUSED_UNROLL for (int m = 0; m < kTile; ++m) sum[r][m] = zero();
  }
  for_blocks(inner, [&](int64_t k, auto move) __attribute__((always_inline)) {
    Block row[kRows];
    WNFUSED_UNROLL for (int r = 0; r < kRows; ++r) {
      row[r] = move.load(v + r * inner + k);
      if (square) norm[r] = multiply_add(row[r], row[r], norm[r]);
    }
    WNFUSED_UNROLL for (int m = 0; m < kTile; ++m) {
      const Block operand = move.load(x + m * inner + k);
      WNFUSED_UNROLL for (int r = 0; r < kRows; ++r) sum[r][m] = multiply_add(row[r], operand, sum[r][m]);
    }
  });
  WNFUSED_UNROLL for (int r = 0; r < kRows; ++r) {
    if (square) square[r] = sum_of(norm[r]);
    WNFUSED_UNROLL for (int m = 0; m < kTile; ++m) product[r][m] = sum_of(sum[r][m]);
  }
}

WNFUSED_INLINE float activated(float z, Activation activation, float slope) {
  if (activation == Activation::kRelu) return z <= 0 ? 0.0f : z;
  if (activation == Activation::kLeakyRelu) return z > 0 ? z : z * slope;
  return z;
}

// Features [first, first + kRows) for rows [m, m + kTile) of x; the norms come with the first tile.
template <int kRows, int kTile>
WNFUSED_INLINE void small_tile(const SmallLinear& task, int64_t first, int64_t m) {
  float product[kRows][kTile], square[kRows];
  dot_tile<kRows, kTile>(task.v + first * task.inner, task.x + m * task.inner, task.inner, product, m == 0 ? square : nullptr);
  for (int r = 0; r < kRows; ++r) {
    const int64_t feature = first + r;
    if (m == 0) task.norm[feature] = __builtin_sqrtf(square[r]);
    const float scale = task.gain[feature] * inverse_or_zero(task.norm[feature]);
    for (int t = 0; t < kTile; ++t) {
      const int64_t at = (m + t) * task.features + feature;
      float z = scale * product[r][t] + (task.bias ? task.bias[feature] : 0.0f);
      if (task.residual) z += task.residual[at];
      task.y[at] = activated(z, task.activation, task.slope);
    }
  }
}

template <int kTile>
WNFUSED_INLINE void small_features(const SmallLinear& task, int64_t begin, int64_t end, int64_t m) {
  constexpr int kRows = kSumBlocks / (kTile + 1) > 3 ? 3 : kSumBlocks / (kTile + 1) < 1 ? 1 : kSumBlocks / (kTile + 1);
  int64_t first = begin;
  for (; first + kRows <= end; first += kRows) small_tile<kRows, kTile>(task, first, m);
  for (; first < end; ++first) small_tile<1, kTile>(task, first, m);
}

// Slices of features whose rows of v stay in L1 or L2 while the tiles of x pass by.
inline void small_linear(const SmallLinear& task, int64_t begin, int64_t end) {
  const int64_t slice = task.rows > kMaxSmallTile ? 8 : end - begin;
  for (int64_t first = begin; first < end; first += slice) {
    const int64_t last = first + slice < end ? first + slice : end;
    int64_t m = 0;
    for (; m + kMaxSmallTile <= task.rows; m += kMaxSmallTile) small_features<kMaxSmallTile>(task, first, last, m);
    switch (task.rows - m) {
      case 7: small_features<4>(task, first, last, m); m += 4; [[fallthrough]];
      case 3: small_features<2>(task, first, last, m); m += 2; [[fallthrough]];
      case 1: small_features<1>(task, first, last, m); break;
      case 6: small_features<4>(task, first, last, m); m += 4; [[fallthrough]];
      case 2: small_features<2>(task, first, last, m); break;
      case 5: small_features<4>(task, first, last, m); m += 4; small_features<1>(task, first, last, m); break;
      case 4: small_features<4>(task, first, last, m); break;
      default: break;
    }
  }
}

template <int kRows, bool kInput, bool kParameters>
WNFUSED_INLINE void small_gradient(const SmallLinearBackward& task, int64_t first) {
  float weight[kSmallRows][kRows], scaled[kSmallRows][kRows];
  for (int r = 0; r < kRows; ++r) {
    const float scale = task.gain[first + r] * inverse_or_zero(task.norm[first + r]);
    for (int64_t m = 0; m < task.rows; ++m) {
      weight[m][r] = task.dz[m * task.features + first + r];
      scaled[m][r] = scale * weight[m][r];
    }
  }
  const float* v = task.v + first * task.inner;
  float* dv = kParameters ? task.dv + first * task.inner : nullptr;
  for_blocks(task.inner, [&](int64_t k, auto move) __attribute__((always_inline)) {
    Block row[kRows], dw[kRows];
    WNFUSED_UNROLL for (int r = 0; r < kRows; ++r) {
      if (kInput) row[r] = move.load(v + r * task.inner + k);
      dw[r] = zero();
    }
    for (int64_t m = 0; m < task.rows; ++m) {
      if constexpr (kParameters) {
        const Block operand = move.load(task.x + m * task.inner + k);
        WNFUSED_UNROLL for (int r = 0; r < kRows; ++r) dw[r] = multiply_add(splat(weight[m][r]), operand, dw[r]);
      }
      if constexpr (kInput) {
        Block dx = move.load(task.dx + m * task.inner + k);
        WNFUSED_UNROLL for (int r = 0; r < kRows; ++r) dx = multiply_add(splat(scaled[m][r]), row[r], dx);
        move.store(task.dx + m * task.inner + k, dx);
      }
    }
    if constexpr (kParameters)
      WNFUSED_UNROLL for (int r = 0; r < kRows; ++r) move.store(dv + r * task.inner + k, dw[r]);
  });
  if constexpr (kParameters)
    for (int r = 0; r < kRows; ++r) {
      float* row = dv + r * task.inner;
      task.dgain[first + r] =
          gradient_row(row, v + r * task.inner, row, task.inner, task.gain[first + r], task.norm[first + r]);
    }
}

template <int kRows, bool kInput, bool kParameters>
WNFUSED_INLINE void small_gradients(const SmallLinearBackward& task, int64_t begin, int64_t end) {
  int64_t first = begin;
  for (; first + kRows <= end; first += kRows) small_gradient<kRows, kInput, kParameters>(task, first);
  for (; first < end; ++first) small_gradient<1, kInput, kParameters>(task, first);
}

// More rows of v at once spare loads and stores of dx, but each is a stream of memory more: a trade that the number of
// rows of x decides.
template <bool kInput, bool kParameters>
WNFUSED_INLINE void small_gradients(const SmallLinearBackward& task, int64_t begin, int64_t end) {
  if (task.rows == 1) small_gradients<2, kInput, kParameters>(task, begin, end);
  else if (task.rows <= 4 || kParts > 1) small_gradients<4, kInput, kParameters>(task, begin, end);
  else small_gradients<8, kInput, kParameters>(task, begin, end);
}

inline void small_linear_backward(const SmallLinearBackward& task, int64_t begin, int64_t end) {
  if (task.dx && task.dv) small_gradients<true, true>(task, begin, end);
  else if (task.dx) small_gradients<true, false>(task, begin, end);
  else small_gradients<false, true>(task, begin, end);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

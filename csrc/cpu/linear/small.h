// The whole linear layer for a handful of rows of x: v streams past x once, forward and backward.
//
//      forward    R rows of v x up to 8 rows of x, one Block of running sums a pair, and one a row of v for its norm
//
//                       k ->                      sum[r][m] += v[r][k] x[m][k]     R loads of v, M of x
//            v[r]  |----|----|----|               square[r] += v[r][k]^2           R M + R multiply-adds
//            x[m]  |----|----|----|
//
//      backward   R rows of v:  dw[r][k] = sum_m dz[m][r] x[m][k]        stays in L1 (it is dv's memory)
//                               dx[m][k] += sum_r s_r dz[m][r] v[r][k]   dx is a share's own, in L2
//                               then dv[r] = s_r (dw[r] - v[r] <dw[r], v[r]> / ||v[r]||^2)
//
// Floor: v once; backward v once and dv once, which is what the un-normalised layer moves for dx and dw.
#pragma once

#include "cpu/layer/epilogue.h"
#include "cpu/layer/rows.h"
#include "cpu/products/gemm.h"

namespace wnfused::cpu::WNFUSED_ISA {

// What fits the register file beside the operands.
constexpr int kSumBlocks = kParts == 1 ? 18 : kParts == 2 ? 5 : 4;
constexpr int kMaxSmallTile = kParts == 1 ? 8 : 4;

// Running sums of kRows rows of v and kTile of x, and of the squares of v's: vectors whose lanes are yet to be added.
// inner: units of a row.
template <class Units, int kRows, int kTile, class V>
WNFUSED_INLINE void dot_tile(const V* v, const float* x, int64_t inner, Block (&product)[kTile][kLanes], int64_t first,
                             Block* square) {
  Block sum[kRows][kTile], norm[kRows];
  WNFUSED_UNROLL for (int r = 0; r < kRows; ++r) {
    norm[r] = zero();
    WNFUSED_UNROLL for (int m = 0; m < kTile; ++m) sum[r][m] = zero();
  }
  for_blocks(inner, [&](int64_t k, auto move) __attribute__((always_inline)) {
    Block row[kRows];
    WNFUSED_UNROLL for (int r = 0; r < kRows; ++r) {
      row[r] = move.load(v + r * inner + k);
      if (square) {
        __builtin_prefetch(v + (r + kRows) * inner + k, 0, 2);
        norm[r] = Units::multiply_add(row[r], row[r], norm[r]);
      }
    }
    WNFUSED_UNROLL for (int m = 0; m < kTile; ++m) {
      const Block operand = move.load(x + m * inner + k);
      WNFUSED_UNROLL for (int r = 0; r < kRows; ++r) sum[r][m] = Units::multiply_add(row[r], operand, sum[r][m]);
    }
  });
  WNFUSED_UNROLL for (int r = 0; r < kRows; ++r) {
    if (square) square[first + r] = norm[r];
    WNFUSED_UNROLL for (int m = 0; m < kTile; ++m) product[m][first + r] = sum[r][m];
  }
}

// The norms of up to 16 features. The instruction for pairs loses squares that are denormals.
template <class Units>
WNFUSED_INLINE void small_norms(const SmallLinear& task, int64_t first, int64_t count, const Block (&squares)[kLanes]) {
  constexpr float kSafe = 0x1p-90f;
  float square[kLanes];
  store(square, sums_of(squares));
  for (int64_t r = 0; r < count; ++r) {
    if constexpr (Units::kUnit.entries == 2) {
      const uint16_t* row = static_cast<const uint16_t*>(task.v.data) + (first + r) * task.inner;
      if (square[r] < kSafe) square[r] = dot(row, row, task.inner);
    }
    task.norm[first + r] = __builtin_sqrtf(square[r]);
  }
}

// y of up to 16 features, for kTile rows of x from m on, from their sums. False if not all is finite.
template <int kTile, class Y, class Move>
WNFUSED_INLINE bool finish_features(const SmallLinear& task, int64_t first, int64_t m, const Move& move,
                                    const Block& scale, const Block (&sums)[kTile]) {
  const Block bias = task.bias ? move.load(task.bias + first) : zero(), slope = splat(task.slope);
  Y* y = static_cast<Y*>(task.y.data);
  Block nothing = zero();  // NaN once a sum is not finite
  with_activation(task.activation, [&](auto activation) __attribute__((always_inline)) {
    WNFUSED_UNROLL for (int t = 0; t < kTile; ++t) {
      const int64_t at = (m + t) * task.features + first;
      Block z = multiply_add(sums[t], scale, bias);
      nothing = multiply_add(z, zero(), nothing);
      if (task.residual) z = z + move.load(task.residual + at);
      move.store(y + at, activate<activation.value>(z, slope));
    }
  });
  return sum_of(nothing) == 0;
}

// Up to 16 features from `first` on, for rows [m, m + kTile) of x; the norms come with the first tile.
template <class Units, int kTile, class V>
WNFUSED_INLINE bool small_features(const SmallLinear& task, const V* v, int64_t first, int64_t count, int64_t m) {
  // As many as there are registers for, up to two streams of v; four where one row of x has little to do with each.
  constexpr int kFit = kSumBlocks / (kTile + 1), kRows = kTile == 1 && kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  Block sums[kTile][kLanes], squares[kLanes];
  const int64_t inner = task.inner / Units::kUnit.entries;
  const float* x = static_cast<const float*>(task.x.data) + m * inner;
  Block* square = m == 0 ? squares : nullptr;
  int64_t r = 0;
  for (; r + kRows <= count; r += kRows)
    dot_tile<Units, kRows, kTile>(v + (first + r) * inner, x, inner, sums, r, square);
  for (; r < count; ++r) dot_tile<Units, 1, kTile>(v + (first + r) * inner, x, inner, sums, r, square);
  for (; r < kLanes; ++r) {
    squares[r] = zero();
    WNFUSED_UNROLL for (int t = 0; t < kTile; ++t) sums[t][r] = zero();
  }
  if (m == 0) small_norms<Units>(task, first, count, squares);
  float scale[kLanes] = {};
  bool fits = true;
  for (int64_t i = 0; i < count; ++i) {
    scale[i] = row_scale(task.gain[first + i], task.norm[first + i]);
    fits = fits && can_wait(scale[i]);
  }
  Block products[kTile];
  WNFUSED_UNROLL for (int t = 0; t < kTile; ++t) products[t] = sums_of(sums[t]);
  const auto finish = [&](const auto& move) __attribute__((always_inline)) {
    fits &= task.y.bfloat16 ? finish_features<kTile, uint16_t>(task, first, m, move, load(scale), products)
                            : finish_features<kTile, float>(task, first, m, move, load(scale), products);
  };
  if (count == kLanes) finish(Whole{});
  else finish(Partial{count});
  return fits;
}

// Rows of v stay in L1 or L2 while the tiles of x pass by.
template <class Units, class V>
WNFUSED_INLINE bool small_slices(const SmallLinear& task, const V* v, int64_t begin, int64_t end) {
  bool in_range = true;
  for (int64_t first = begin; first < end; first += kLanes) {
    const int64_t count = smaller(kLanes, end - first);
    int64_t m = 0;
    for (; m + kMaxSmallTile <= task.rows; m += kMaxSmallTile)
      in_range &= small_features<Units, kMaxSmallTile>(task, v, first, count, m);
    if (kMaxSmallTile > 4 && task.rows - m >= 4) in_range &= small_features<Units, 4>(task, v, first, count, m), m += 4;
    if (task.rows - m >= 2) in_range &= small_features<Units, 2>(task, v, first, count, m), m += 2;
    if (task.rows - m >= 1) in_range &= small_features<Units, 1>(task, v, first, count, m);
  }
  return in_range;
}

inline bool small_linear(const SmallLinear& task, int64_t begin, int64_t end) {
  bool in_range = true;
  with_entries(task.v, [&](auto* v) __attribute__((always_inline)) {
    in_range = small_slices<Singles>(task, v, begin, end);
  });
  return in_range;
}

template <int kRows, bool kInput, bool kParameters, class V>
WNFUSED_INLINE void small_gradient(const SmallLinearBackward& task, const V* all, int64_t first) {
  float weight[kSmallRows][kRows], scaled[kSmallRows][kRows];
  for (int r = 0; r < kRows; ++r) {
    const float scale = row_scale(task.gain[first + r], task.norm[first + r]);
    for (int64_t m = 0; m < task.rows; ++m) {
      weight[m][r] = task.dz[m * task.features + first + r];
      scaled[m][r] = scale * weight[m][r];
    }
  }
  const V* v = all + first * task.inner;
  V* dv = kParameters ? static_cast<V*>(task.dv.data) + first * task.inner : nullptr;
  float* gradient = task.scratch;
  if constexpr (std::is_same_v<V, float>) gradient = dv;
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
      WNFUSED_UNROLL for (int r = 0; r < kRows; ++r) move.store(gradient + r * task.inner + k, dw[r]);
  });
  if constexpr (kParameters)
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = r * task.inner;
      task.dgain[first + r] =
          gradient_row(gradient + at, v + at, dv + at, task.inner, task.gain[first + r], task.norm[first + r]);
    }
}

// Of a single row of x, whose dw = dz x is cheaper to find twice than to keep in between.
template <int kRows, bool kInput, class V>
WNFUSED_INLINE void small_gradient_of_one(const SmallLinearBackward& task, const V* all, int64_t first) {
  const V* v = all + first * task.inner;
  V* dv = static_cast<V*>(task.dv.data) + first * task.inner;
  float scale[kRows];
  Block dz[kRows], scaled[kRows], along[kRows];  // <dw, v>, lanes yet to be added
  for (int r = 0; r < kRows; ++r) {
    scale[r] = row_scale(task.gain[first + r], task.norm[first + r]);
    dz[r] = splat(task.dz[first + r]);
    scaled[r] = splat(scale[r] * task.dz[first + r]);
    along[r] = zero();
  }
  for_blocks(task.inner, [&](int64_t k, auto move) __attribute__((always_inline)) {
    const Block x = move.load(task.x + k);
    Block dx = kInput ? move.load(task.dx + k) : zero();
    WNFUSED_UNROLL for (int r = 0; r < kRows; ++r) {
      const Block row = move.load(v + r * task.inner + k);
      along[r] = multiply_add(dz[r] * x, row, along[r]);
      if (kInput) dx = multiply_add(scaled[r], row, dx);
    }
    if (kInput) move.store(task.dx + k, dx);
  });
  for (int r = 0; r < kRows; ++r) {
    const float norm = task.norm[first + r], inverse = norm == 0 ? 0.0f : 1.0f / norm;
    const float dgain = norm == 0 ? 0.0f : sum_of(along[r]) * inverse;
    task.dgain[first + r] = dgain;
    const Block back = splat(-dgain * inverse), outer = splat(scale[r]);
    for_blocks(task.inner, [&](int64_t k, auto move) __attribute__((always_inline)) {
      const int64_t at = r * task.inner + k;
      const Block dw = dz[r] * move.load(task.x + k);
      const Block row =
          task.inner == 1 ? single_gradient(dw) : outer * multiply_add(back, move.load(v + at), dw);
      move.store(dv + at, norm == 0 ? zero() : row);
    });
  }
}

template <int kRows, bool kInput, bool kParameters, class V>
WNFUSED_INLINE void small_gradients(const SmallLinearBackward& task, const V* v, int64_t begin, int64_t end) {
  int64_t first = begin;
  for (; first + kRows <= end; first += kRows) small_gradient<kRows, kInput, kParameters>(task, v, first);
  for (; first < end; ++first) small_gradient<1, kInput, kParameters>(task, v, first);
}

template <bool kInput, class V>
WNFUSED_INLINE void small_gradients_of_one(const SmallLinearBackward& task, const V* v, int64_t begin, int64_t end) {
  constexpr int kRows = 2;
  int64_t first = begin;
  for (; first + kRows <= end; first += kRows) small_gradient_of_one<kRows, kInput>(task, v, first);
  for (; first < end; ++first) small_gradient_of_one<1, kInput>(task, v, first);
}

// More rows of v at once spare loads and stores of dx, but each is a stream of memory more: a trade that the number of
// rows of x decides.
template <bool kInput, bool kParameters>
WNFUSED_INLINE void small_gradients(const SmallLinearBackward& task, int64_t begin, int64_t end) {
  with_entries(task.v, [&](auto* v) __attribute__((always_inline)) {
    if (kParameters && task.rows == 1) small_gradients_of_one<kInput>(task, v, begin, end);
    else if (task.rows == 1) small_gradients<2, kInput, kParameters>(task, v, begin, end);
    else if (task.rows <= 4 || kParts > 1) small_gradients<4, kInput, kParameters>(task, v, begin, end);
    else small_gradients<kSmallTile, kInput, kParameters>(task, v, begin, end);
  });
}

inline void small_linear_backward(const SmallLinearBackward& task, int64_t begin, int64_t end) {
  // For an empty batch dx is null, too; for rows without entries dv is, though their gain still has a gradient.
  if (task.dx && task.dgain) small_gradients<true, true>(task, begin, end);
  else if (task.dx) small_gradients<true, false>(task, begin, end);
  else if (task.dgain) small_gradients<false, true>(task, begin, end);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

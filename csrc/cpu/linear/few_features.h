// A linear layer of few features (few.h). Forward v's rows stand where small.h has those of x, and 16 rows of x where
// it has those of v: a sum is added up across a vector once for 16 entries of y. Backward kTile rows of x at a time:
//
//      dx[m][k]  =  sum_n (s dz)[m][n] v[n][k]       kFeatures loads of v, kTile stores
//      dw[n][k] +=  sum_m dz[m][n] x[m][k]           kTile loads of x; dw is in L1, loaded and stored once a tile
#pragma once

#include "cpu/layer/epilogue.h"
#include "cpu/linear/few.h"
#include "cpu/linear/small.h"

namespace wnfused::cpu::WNFUSED_ISA {

// visit(std::integral_constant<int, count>) for a count of 1 to kFew.
template <class Visit>
WNFUSED_INLINE void with_few(int64_t count, const Visit& visit) {
  static_assert(kFew == 4);
  switch (count) {
    case 1: return visit(std::integral_constant<int, 1>{});
    case 2: return visit(std::integral_constant<int, 2>{});
    case 3: return visit(std::integral_constant<int, 3>{});
    default: return visit(std::integral_constant<int, 4>{});
  }
}

template <int kFeatures>
WNFUSED_INLINE bool few_features_rows(const FewForward& task, int64_t begin, int64_t end) {
  constexpr int kFit = kSumBlocks / (kFeatures + 1), kRows = kFit >= 8 ? 8 : kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  const Block slope = splat(task.slope);
  Block nothing = zero();  // NaN once a sum is not finite
  for (int64_t first = begin; first < end; first += kLanes) {
    const int64_t count = smaller(kLanes, end - first);
    Block sums[kFeatures][kLanes];
    int64_t r = 0;
    const auto add = [&](auto rows) __attribute__((always_inline)) {
      for (; r + rows.value <= count; r += rows.value)
        dot_tile<Singles, rows.value, kFeatures>(
            task.x + (first + r) * task.inner, task.v, task.inner, sums, r, nullptr);
    };
    add(std::integral_constant<int, kRows>{});
    add(std::integral_constant<int, 1>{});
    for (; r < kLanes; ++r)
      WNFUSED_UNROLL for (int n = 0; n < kFeatures; ++n) sums[n][r] = zero();
    float products[kLanes * kFeatures];  // as y lies
    WNFUSED_UNROLL for (int n = 0; n < kFeatures; ++n) {
      const Block z = multiply_add(sums_of(sums[n]), splat(task.scale[n]), splat(task.bias ? task.bias[n] : 0.0f));
      nothing = multiply_add(z, zero(), nothing);
      float column[kLanes];
      store(column, z);
      for (int i = 0; i < kLanes; ++i) products[i * kFeatures + n] = column[i];
    }
    const int64_t at = first * kFeatures;
    with_activation(task.activation, [&](auto activation) __attribute__((always_inline)) {
      for_blocks(count * kFeatures, [&](int64_t i, auto move) __attribute__((always_inline)) {
        Block z = load(products + i);
        if (task.residual) z = z + move.load(task.residual + at + i);
        move.store(task.y + at + i, activate<activation.value>(z, slope));
      });
    });
  }
  return sum_of(nothing) == 0;
}

inline bool few_features(const FewForward& task, int64_t begin, int64_t end) {
  bool finite = true;
  with_few(task.features, [&](auto features) __attribute__((always_inline)) {
    finite = few_features_rows<features.value>(task, begin, end);
  });
  return finite;
}

// dz of kTile rows from m on, and with it the bias gradient.
template <int kFeatures, int kTile>
WNFUSED_INLINE void few_features_mask(const FewBackward& task, int64_t m, float (&dz)[kLanes]) {
  const Partial move{kFeatures * kTile};
  static_assert(kFeatures * kTile <= kLanes);
  const int64_t at = m * kFeatures;
  with_mask(task.activation, task.slope, [&](auto activation) __attribute__((always_inline)) {
    Block gradient = move.load(task.dy + at);
    if constexpr (activation.value != Activation::kNone)
      gradient = masked<activation.value>(gradient, move.load(task.y + at), splat(task.slope));
    if (task.dz) move.store(task.dz + at, gradient);
    store(dz, gradient);
  });
  if (task.dbias)
    for (int n = 0; n < kFeatures; ++n)
      for (int t = 0; t < kTile; ++t) task.dbias[n] += dz[t * kFeatures + n];
}

template <int kFeatures, int kTile>
WNFUSED_INLINE void few_features_tile(const FewBackward& task, int64_t m) {
  float dz[kLanes], scaled[kLanes];
  few_features_mask<kFeatures, kTile>(task, m, dz);
  for (int i = 0; i < kFeatures * kTile; ++i) scaled[i] = task.scale[i % kFeatures] * dz[i];
  const float* x = task.x + m * task.inner;
  for_blocks(task.inner, [&](int64_t k, auto move) __attribute__((always_inline)) {
    if (task.dx) {
      Block dx[kTile];
      WNFUSED_UNROLL for (int n = 0; n < kFeatures; ++n) {
        const Block row = move.load(task.v + n * task.inner + k);
        WNFUSED_UNROLL for (int t = 0; t < kTile; ++t) {
          const Block entry = splat(scaled[t * kFeatures + n]);
          dx[t] = n == 0 ? entry * row : multiply_add(entry, row, dx[t]);
        }
      }
      WNFUSED_UNROLL for (int t = 0; t < kTile; ++t) move.store(task.dx + (m + t) * task.inner + k, dx[t]);
    }
    if (task.dw) {
      Block rows[kTile];
      WNFUSED_UNROLL for (int t = 0; t < kTile; ++t) rows[t] = move.load(x + t * task.inner + k);
      WNFUSED_UNROLL for (int n = 0; n < kFeatures; ++n) {
        Block dw = move.load(task.dw + n * task.inner + k);
        WNFUSED_UNROLL for (int t = 0; t < kTile; ++t)
          dw = multiply_add(splat(dz[t * kFeatures + n]), rows[t], dw);
        move.store(task.dw + n * task.inner + k, dw);
      }
    }
  });
}

inline void few_features_backward(const FewBackward& task, int64_t begin, int64_t end) {
  constexpr int kTile = 4;
  with_few(task.features, [&](auto features) __attribute__((always_inline)) {
    int64_t m = begin;
    for (; m + kTile <= end; m += kTile) few_features_tile<features.value, kTile>(task, m);
    for (; m < end; ++m) few_features_tile<features.value, 1>(task, m);
  });
}

}  // namespace wnfused::cpu::WNFUSED_ISA

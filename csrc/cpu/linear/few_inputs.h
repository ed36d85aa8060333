// The backward of a linear layer of few inputs (few.h), kTile rows of x at a time past all features:
//
//      dz[m][n]  =  act'(y) dy                      a Block each of dy and y
//      dw[k][n] +=  sum_m x[m][k] dz[m][n]          dw is in L1, loaded and stored once a tile
//      dx[m][k]  =  sum_n dz[m][n] (s v)[k][n]      kTile x kInputs sums in registers, added across once a tile
#pragma once

#include "cpu/linear/few_features.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Sums of a tile that the register file holds beside dz.
template <int kInputs>
constexpr int kInputTile = kParts == 1 ? (kInputs == 1 ? 8 : 4) : kInputs <= 2 ? 2 : 1;

template <int kInputs, int kTile, Activation kActivation>
WNFUSED_INLINE void few_inputs_tile(const FewBackward& task, int64_t m) {
  const Block slope = splat(task.slope);
  const float* x = task.x + m * kInputs;
  Block dx[kTile][kInputs];
  WNFUSED_UNROLL for (int t = 0; t < kTile; ++t)
    WNFUSED_UNROLL for (int k = 0; k < kInputs; ++k) dx[t][k] = zero();
  for_blocks(task.features, [&](int64_t n, auto move) __attribute__((always_inline)) {
    Block dz[kTile];
    WNFUSED_UNROLL for (int t = 0; t < kTile; ++t) {
      const int64_t at = (m + t) * task.features + n;
      dz[t] = move.load(task.dy + at);
      if constexpr (kActivation != Activation::kNone)
        dz[t] = masked<kActivation>(dz[t], move.load(task.y + at), slope);
      if (task.dz) move.store(task.dz + at, dz[t]);
    }
    if (task.dbias) {
      Block sum = move.load(task.dbias + n);
      WNFUSED_UNROLL for (int t = 0; t < kTile; ++t) sum = sum + dz[t];
      move.store(task.dbias + n, sum);
    }
    if (task.dw)
      WNFUSED_UNROLL for (int k = 0; k < kInputs; ++k) {
        Block dw = move.load(task.dw + k * task.features + n);
        WNFUSED_UNROLL for (int t = 0; t < kTile; ++t) dw = multiply_add(splat(x[t * kInputs + k]), dz[t], dw);
        move.store(task.dw + k * task.features + n, dw);
      }
    if (task.dx)
      WNFUSED_UNROLL for (int k = 0; k < kInputs; ++k) {
        const Block w = move.load(task.v + k * task.features + n);
        WNFUSED_UNROLL for (int t = 0; t < kTile; ++t) dx[t][k] = multiply_add(dz[t], w, dx[t][k]);
      }
  });
  if (task.dx)
    WNFUSED_UNROLL for (int t = 0; t < kTile; ++t)
      WNFUSED_UNROLL for (int k = 0; k < kInputs; ++k) task.dx[(m + t) * kInputs + k] = sum_of(dx[t][k]);
}

inline void few_inputs_backward(const FewBackward& task, int64_t begin, int64_t end) {
  with_few(task.inner, [&](auto inputs) __attribute__((always_inline)) {
    constexpr int kTile = kInputTile<inputs.value>;
    with_mask(task.activation, task.slope, [&](auto act) __attribute__((always_inline)) {
      int64_t m = begin;
      for (; m + kTile <= end; m += kTile) few_inputs_tile<inputs.value, kTile, act.value>(task, m);
      for (; m < end; ++m) few_inputs_tile<inputs.value, 1, act.value>(task, m);
    });
  });
}

// As gradient_row (rows.h) has it, 16 rows of v at a time.
inline void few_inputs_gradient(const FewGradient& task) {
  for_blocks(task.features, [&](int64_t n, auto move) __attribute__((always_inline)) {
    const Block norm = move.load(task.norm + n), inverse = ratio(splat(1.0f), norm), scale = move.load(task.scale + n);
    Block along = zero();
    for (int64_t k = 0; k < task.inner; ++k) {
      const int64_t at = k * task.features + n;
      along = multiply_add(move.load(task.dw + at), move.load(task.v + at), along);
    }
    const Block dgain = relu_mask(norm, along * inverse), back = -(dgain * inverse);
    move.store(task.dgain + n, dgain);
    for (int64_t k = 0; k < task.inner; ++k) {
      const int64_t at = k * task.features + n;
      const Block dw = move.load(task.dw + at);
      const Block dv =
          task.inner == 1 ? single_gradient(dw) : scale * multiply_add(back, move.load(task.v + at), dw);
      move.store(task.dw + at, relu_mask(norm, dv));  // a row of zeros has no direction
    }
  });
}

}  // namespace wnfused::cpu::WNFUSED_ISA

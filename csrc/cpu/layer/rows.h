// Passes over the rows of v: norms, the scaled weight, and dv, dg from dw.
//
//      v row  | 64 | 64 | 64 | ... | tail |       four running Blocks of squares: 4 fused multiply-adds are in flight
//
// Floor: one read of v for the norms, one write more for w; the gradient reads dw and v twice, the second time from
// L1 (a row of 4096 entries is 16 KB), and writes dv. All of it is memory's time, two FLOPs an entry at most.
#pragma once

#include "cpu/vec/runs.h"

namespace wnfused::cpu::WNFUSED_ISA {

// <a, b> of two runs. The order of the sums depends on the length alone.
template <class A, class B>
WNFUSED_INLINE auto dot(const A* a, const B* b, int64_t length) {
  using Sum = BlockOf<A>;
  constexpr int kChains = 4;
  Sum sum[kChains] = {zero_of<Sum>(), zero_of<Sum>(), zero_of<Sum>(), zero_of<Sum>()};
  int64_t i = 0;
  for (; i + kChains * kLanes <= length; i += kChains * kLanes)
    WNFUSED_UNROLL for (int c = 0; c < kChains; ++c)
      sum[c] = multiply_add(load(a + i + c * kLanes), load(b + i + c * kLanes), sum[c]);
  for_blocks(length - i, [&](int64_t j, auto move) __attribute__((always_inline)) {
    sum[0] = multiply_add(move.load(a + i + j), move.load(b + i + j), sum[0]);
  });
  return sum_of((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// g / ||v||. A zero row has no direction: its scale is 0, also where the gain is infinite.
WNFUSED_INLINE float row_scale(float gain, float norm) { return ratio(gain, norm); }

inline void norms(const RowRange& rows, Values v, float* norm) {
  with_entries(v, [&](auto* entries) __attribute__((always_inline)) {
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const auto* row = entries + r * rows.inner;
      norm[r] = __builtin_sqrtf(dot(row, row, rows.inner));
    }
  });
}

// w = g v / ||v||, where a zero row stays exactly 0.
inline void scaled(const RowRange& rows, Values v, const float* gain, float* norm, Values w) {
  with_entries(v, [&](auto* source) __attribute__((always_inline)) {
    with_entries(w, [&](auto* target) __attribute__((always_inline)) {
      for (int64_t r = rows.begin; r < rows.end; ++r) {
        const auto* row = source + r * rows.inner;
        auto* out = target + r * rows.inner;
        norm[r] = __builtin_sqrtf(dot(row, row, rows.inner));
        if (norm[r] == 0) {
          for_blocks(rows.inner,
                     [&](int64_t i, auto move) __attribute__((always_inline)) { move.store(out + i, zero()); });
          continue;
        }
        const Block scale = splat(row_scale(gain[r], norm[r]));
        for_blocks(rows.inner, [&](int64_t i, auto move) __attribute__((always_inline)) {
          move.store(out + i, scale * move.load(row + i));
        });
      }
    });
  });
}

// dv of rows of a single entry. Such a row has two directions, none beside another: rounding would leave a gradient,
// large scales a large one, and Adam would follow it whatever its size. What is not finite stays so.
WNFUSED_INLINE Block single_gradient(const Block& dw) { return dw * zero(); }

// dgain = <dw, v> / ||v||,  dv = s (dw - v dgain / ||v||), where dw may hold s dw. dv may be dw.
template <class D, class V>
WNFUSED_INLINE float gradient_row(
    const D* dw, const V* v, V* dv, int64_t inner, float gain, float norm, bool scaled = false) {
  if (norm == 0) {
    for_blocks(inner, [&](int64_t i, auto move) __attribute__((always_inline)) { move.store(dv + i, zero()); });
    return 0;
  }
  const float inverse = 1.0f / norm, scale = row_scale(gain, norm);
  const float dgain = dot(dw, v, inner) * inverse;
  const Block factor = splat(scaled ? 1.0f : scale), along = splat(-dgain * inverse);
  for_blocks(inner, [&](int64_t i, auto move) __attribute__((always_inline)) {
    const Block row = move.load(dw + i);
    move.store(dv + i, inner == 1 ? single_gradient(row) : factor * multiply_add(along, move.load(v + i), row));
  });
  return scaled ? dgain / scale : dgain;
}

// A row of dw that lists [taps][channels], in the order of a contiguous v: [channels][taps].
template <class D>
WNFUSED_INLINE void reorder(const D* row, D* ordered, int64_t taps, int64_t channels) {
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t t = 0; t < taps; ++t) ordered[c * taps + t] = row[t * channels + c];
}

template <class D, class V>
WNFUSED_INLINE void gradient_rows(const RowRange& rows, const RowGradient& task, const D* dw, const V* v, V* dv) {
  D* ordered = static_cast<D*>(task.scratch);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const int64_t at = r * rows.inner;
    const D* row = dw + at;
    if (task.taps > 1) {
      if (task.taps == 9) reorder(row, ordered, 9, rows.inner / 9);
      else reorder(row, ordered, task.taps, rows.inner / task.taps);
      row = ordered;
    }
    task.dgain[r] = gradient_row(row, v + at, dv + at, rows.inner, task.gain[r], task.norm[r], task.scaled);
  }
}

inline void gradient(const RowRange& rows, const RowGradient& task) {
  // Of the four pairs of types, dw wider than v does not occur: dw has the dtype of x, v that or float32.
  const auto run = [&](auto* dw, auto* v) {
    using V = std::remove_pointer_t<decltype(v)>;
    gradient_rows(rows, task, dw, v, static_cast<V*>(task.dv.data));
  };
  if (!task.dw.bfloat16) run(static_cast<float*>(task.dw.data), static_cast<float*>(task.v.data));
  else if (task.v.bfloat16) run(static_cast<uint16_t*>(task.dw.data), static_cast<uint16_t*>(task.v.data));
  else run(static_cast<uint16_t*>(task.dw.data), static_cast<float*>(task.v.data));
}

}  // namespace wnfused::cpu::WNFUSED_ISA

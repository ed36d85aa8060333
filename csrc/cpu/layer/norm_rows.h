// The passes that norm.h describes, for one instruction set.
#pragma once

#include "cpu/layer/norm.h"
#include "cpu/layer/rows.h"

namespace wnfused::cpu::WNFUSED_ISA {

template <class T, class W>
inline W sum_run(const T* a, const T* b, int64_t length) {
  return dot(a, b, length);
}

template <class T, class W>
inline void combine_run(const Factors<T, W>& task, int64_t length) {
  using B = BlockOf<T>;
  if (*task.norm == 0) {
    for_blocks(length, [&](int64_t i, auto move) __attribute__((always_inline)) {
      move.store(task.out + i, zero_of<B>());
    });
    return;
  }
  const B s = splat_of<B>(*task.s);
  if (!task.a) {
    for_blocks(length, [&](int64_t i, auto move) __attribute__((always_inline)) {
      move.store(task.out + i, s * move.load(task.v + i));
    });
    return;
  }
  const B t = splat_of<B>(-*task.t);
  for_blocks(length, [&](int64_t i, auto move) __attribute__((always_inline)) {
    move.store(task.out + i, s * multiply_add(t, move.load(task.v + i), move.load(task.a + i)));
  });
}

template <class T, class W>
inline void column_sums(const T* a, const T* b, int64_t lines, int64_t length, W* sums) {
  for (int64_t line = 0; line < lines; ++line) {
    const int64_t at = line * length;
    for_blocks(length, [&](int64_t i, auto move) __attribute__((always_inline)) {
      move.store(sums + i, multiply_add(move.load(a + at + i), move.load(b + at + i), move.load(sums + i)));
    });
  }
}

template <class T, class W>
inline void column_combine(const Factors<T, W>& task, int64_t lines, int64_t length) {
  for (int64_t line = 0; line < lines; ++line) {
    const int64_t at = line * length;
    for_blocks(length, [&](int64_t i, auto move) __attribute__((always_inline)) {
      auto value = move.load(task.v + at + i);
      if (task.a) value = move.load(task.a + at + i) - move.load(task.t + i) * value;
      move.store(task.out + at + i, where_not_zero(move.load(task.norm + i), move.load(task.s + i) * value));
    });
  }
}

template <class T, class W>
constexpr NormKernels<T, W> norm_kernels() {
  return {sum_run<T, W>, combine_run<T, W>, column_sums<T, W>, column_combine<T, W>};
}

}  // namespace wnfused::cpu::WNFUSED_ISA

// The passes that norm.h describes, for one instruction set.
#pragma once

#include <type_traits>

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

// run(line, count) for lines 0, 1, ... of `lines`, several at a time, so that what goes with a column is read once for
// them.
template <class Run>
WNFUSED_INLINE void for_lines(int64_t lines, const Run& run) {
  constexpr int kAtOnce = 4;
  int64_t line = 0;
  for (; line + kAtOnce <= lines; line += kAtOnce) run(line, std::integral_constant<int, kAtOnce>{});
  for (; line < lines; ++line) run(line, std::integral_constant<int, 1>{});
}

template <class T, class W>
inline void column_sums(const T* a, const T* b, int64_t lines, int64_t length, W* sums) {
  for_lines(lines, [&](int64_t line, auto count) __attribute__((always_inline)) {
    const int64_t at = line * length;
    for_blocks(length, [&](int64_t i, auto move) __attribute__((always_inline)) {
      auto sum = move.load(sums + i);
      WNFUSED_UNROLL for (int l = 0; l < count.value; ++l)
        sum = multiply_add(move.load(a + at + l * length + i), move.load(b + at + l * length + i), sum);
      move.store(sums + i, sum);
    });
  });
}

template <class T, class W>
inline void column_combine(const Factors<T, W>& task, int64_t lines, int64_t length) {
  for_lines(lines, [&](int64_t line, auto count) __attribute__((always_inline)) {
    for_blocks(length, [&](int64_t i, auto move) __attribute__((always_inline)) {
      const auto s = move.load(task.s + i), t = move.load(task.t + i), norm = move.load(task.norm + i);
      WNFUSED_UNROLL for (int l = 0; l < count.value; ++l) {
        const int64_t at = (line + l) * length + i;
        auto value = move.load(task.v + at);
        if (task.a) value = move.load(task.a + at) - t * value;
        move.store(task.out + at, where_not_zero(norm, s * value));
      }
    });
  });
}

template <class T, class W>
constexpr NormKernels<T, W> norm_kernels() {
  return {sum_run<T, W>, combine_run<T, W>, column_sums<T, W>, column_combine<T, W>};
}

}  // namespace wnfused::cpu::WNFUSED_ISA

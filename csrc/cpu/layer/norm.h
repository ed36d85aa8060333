// Row norms and what follows from them: the passes over v, dw and dv, of an instruction set.
//
// T is the type of the entries (float, bfloat16 as uint16_t, double), W that of sums and of the numbers a row: float,
// and double for double. A run is `length` entries in a row of memory.
//
//      runs      a row of v is one run: its sums and factors are one number
//      columns   rows along another dim: a line of memory holds entries of every row; sums and factors are one number a
//                column
//
//      combine   forward (a null)    out = s v
//                backward            out = s (a - t v)     exactly 0 where s is that of a zero row: `norm` is 0
//
// Floor: sums read a and b once, combine reads a and v and writes out; a row of 4096 floats comes from L1 the second
// time.
#pragma once

#include <cstdint>

namespace wnfused::cpu {

template <class T, class W>
struct Factors {
  const T *a, *v;
  T* out;
  const W *s, *t, *norm;
};

template <class T, class W>
struct NormKernels {
  W (*sum)(const T* a, const T* b, int64_t length);
  void (*combine)(const Factors<T, W>&, int64_t length);
  void (*column_sums)(const T* a, const T* b, int64_t lines, int64_t length, W* sums);  // added to
  void (*column_combine)(const Factors<T, W>&, int64_t lines, int64_t length);
};

}  // namespace wnfused::cpu

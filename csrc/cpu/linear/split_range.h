// Whether the sums of a product of floats in pieces (gemm_tiles.h) are as exact as those of floats: each row, or
// column, of an operand that an entry of the product sums over is zero, or its largest entry between 2^-50 and 2^50.
// What pieces lose of smaller entries is then below 2^-24 of the largest product.
#pragma once

#include "cpu/linear/linear_layer.h"
#include "cpu/vec/runs.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Sizes as the bits of floats, which are ordered as these, infinities and NaN above.
struct Sizes {
  NativeBits part[kParts] = {};

  WNFUSED_INLINE void gather(NativeBits bits, int i) {
    bits &= 0x7fffffffu;
    part[i] = bits > part[i] ? bits : part[i];
  }

  WNFUSED_INLINE void gather(const Block& a) {
    WNFUSED_FOR_PARTS gather((NativeBits)a.part[i], i);
  }

  // Both halves of a pair.
  WNFUSED_INLINE void gather_pairs(const Block& pairs) {
    WNFUSED_FOR_PARTS {
      gather((NativeBits)pairs.part[i] << 16, i);
      gather((NativeBits)pairs.part[i] & 0xffff0000u, i);
    }
  }

  WNFUSED_INLINE uint32_t largest() const {
    uint32_t most = 0;
    for (int i = 0; i < kParts; ++i)
      for (int lane = 0; lane < kNativeLanes; ++lane) most = part[i][lane] > most ? part[i][lane] : most;
    return most;
  }

  WNFUSED_INLINE bool all_in_range() const {
    bool all = true;
    for (int i = 0; i < kParts; ++i)
      for (int lane = 0; lane < kNativeLanes; ++lane) all = all && in_split_range(part[i][lane]);
    return all;
  }
};

// Rows [begin, end) of a matrix; and the largest bits of its columns, onto `columns` unless it is null.
inline bool rows_in_split_range(const float* matrix, int64_t begin, int64_t end, int64_t length, uint32_t* columns) {
  bool all = true;
  for (int64_t r = begin; r < end; ++r) {
    Sizes sizes;
    for_blocks(length, [&](int64_t i, auto move) __attribute__((always_inline)) {
      const Block entries = move.load(matrix + r * length + i);
      sizes.gather(entries);
      if (!columns) return;
      Sizes column;
      float* sum = reinterpret_cast<float*>(columns) + i;
      column.gather(move.load(sum));
      column.gather(entries);
      Block largest;
      WNFUSED_FOR_PARTS largest.part[i] = (Native)column.part[i];
      move.store(sum, largest);
    });
    all = all && in_split_range(sizes.largest());
  }
  return all;
}

}  // namespace wnfused::cpu::WNFUSED_ISA

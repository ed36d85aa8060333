// Products of two matrices in pairs of bfloat16 on tiles (pair_amx.h), over the operands of gemm.h: 16 rows of the narrow
// one are a tile as they lie, 16 units of a block of the wide one another.
//
// 64 rows of the narrow operand, 128 units deep, are 32 KB, which the first level of cache holds; the wide one comes from
// the second, once for all of them.
#pragma once

#include "cpu/products/gemm.h"
#include "cpu/products/pair_amx.h"

namespace wnfused::cpu::WNFUSED_ISA {

struct TileUnits : PairRuns {
  static constexpr DepthUnit kUnit{2, tiles::kRows, 128};
  static constexpr int64_t kRows = tiles::kRows;

  static void multiply(const float* narrow, int64_t rows, const float* wide, int64_t wide_stride, int64_t blocks,
                       int64_t units, float* out, int64_t out_stride, int64_t out_col_stride, bool accumulate) {
    const Segment segment{reinterpret_cast<const uint16_t*>(narrow), reinterpret_cast<const uint16_t*>(wide)};
    const PairProduct product{&segment, 1, 2 * units, 2 * kUnit.chunk, 2 * wide_stride, accumulate, false};
    int64_t offsets[kNarrowRows / tiles::kRows];
    const int64_t groups = rows / tiles::kRows;
    for (int64_t g = 0; g < groups; ++g) offsets[g] = g * tiles::kRows * product.row_stride;
    StridedSink sink{{out, out_col_stride, out_stride}};
    Pairs::multiply(product, offsets, groups, blocks, sink);
  }

 private:
  // Sums that stay where they are.
  struct StridedSink {
    TileSums sums;

    WNFUSED_INLINE TileSums place(int64_t group, int64_t, int64_t col, int64_t) const {
      const int64_t row = group * tiles::kRows;
      return {sums.out + col * sums.block_stride + row * sums.row_stride, sums.block_stride, sums.row_stride};
    }
    WNFUSED_INLINE void meanwhile() const {}
    WNFUSED_INLINE void ready(const TileSums&, int64_t, int64_t, int64_t, int64_t) const {}
  };
};

}  // namespace wnfused::cpu::WNFUSED_ISA

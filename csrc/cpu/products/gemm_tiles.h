// Products of two matrices on tiles (pair_amx.h), over the operands of gemm.h: 16 rows of the narrow one are a tile as they
// lie, 16 units of a block of the wide one another.
//
// TileUnits multiplies bfloat16. SplitUnits multiplies floats, each as the sum of three bfloat16 of 8 bits, which is exact:
//
//   a b = a0 b0 + (a0 b1 + a1 b0) + (a0 b2 + a1 b1 + a2 b0) + what is left out, 2^-24 a b at most
//
// Six products at a sixteenth of the price of one in float32. Pieces of numbers below 2^-100 would be denormals, which
// tiles take for zero, hence the limits of split_range.h.
//
// The narrow operand, 64 rows deep enough to fill half of the first level of cache, stays there; the wide one comes from
// the second, once for all of them.
#pragma once

#include "cpu/products/gemm.h"
#include "cpu/products/pair_amx.h"

namespace wnfused::cpu::WNFUSED_ISA {

// What the units of tiles multiply with. Units::kProducts lists the pieces of the two operands that are multiplied.
template <class Units>
struct TileProducts {
  static constexpr int64_t kRows = tiles::kRows;

  static void multiply(const float* narrow, int64_t rows, const float* wide, int64_t wide_stride, int64_t blocks,
                       int64_t units, float* out, int64_t out_stride, int64_t out_col_stride, bool accumulate) {
    constexpr int64_t kCount = sizeof Units::kProducts / sizeof Units::kProducts[0], kChunk = Units::kUnit.chunk;
    const int64_t piece_floats = wide_stride / Units::kUnit.pieces;
    Segment segments[kCount];
    for (int64_t i = 0; i < kCount; ++i)
      segments[i] = {reinterpret_cast<const uint16_t*>(narrow + Units::kProducts[i][0] * kNarrowRows * kChunk),
                     reinterpret_cast<const uint16_t*>(wide + Units::kProducts[i][1] * piece_floats)};
    const PairProduct product{segments, kCount, 2 * units, 2 * kChunk, 2 * wide_stride, accumulate, false};
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

struct TileUnits : PairRuns, TileProducts<TileUnits> {
  static constexpr DepthUnit kUnit{2, tiles::kRows, 128};
  static constexpr int kProducts[][2] = {{0, 0}};
};

// The nearest number of 8 bits; halves away from zero.
WNFUSED_INLINE Block leading_bits(const Block& a) {
  Block result;
  WNFUSED_FOR_PARTS result.part[i] = (Native)(((NativeBits)a.part[i] + 0x8000u) & 0xffff0000u);
  return result;
}

struct SplitUnits : TileProducts<SplitUnits> {
  static constexpr DepthUnit kUnit{2, tiles::kRows, 32, 3};
  // The smallest first.
  static constexpr int kProducts[][2] = {{2, 0}, {1, 1}, {0, 2}, {1, 0}, {0, 1}, {0, 0}};

  WNFUSED_INLINE static Packed<3> of_run(const void*, const Block& first, const Block& second) {
    const Pieces a(first), b(second);
    return {{rounded_run(a.at[0], b.at[0]), rounded_run(a.at[1], b.at[1]), rounded_run(a.at[2], b.at[2])}};
  }

  template <class T>
  WNFUSED_INLINE static Packed<3> along(const Runs<T>& runs, int64_t run, int64_t unit) {
    return of_run(nullptr, runs.entries(run, 2 * unit), runs.entries(run, 2 * unit + kLanes));
  }

  template <class T>
  WNFUSED_INLINE static Packed<3> across(const Runs<T>& runs, int64_t unit, int64_t at) {
    const Pieces a(runs.entries(2 * unit, at)), b(runs.entries(2 * unit + 1, at));
    return {{exact_pairs(a.at[0], b.at[0]), exact_pairs(a.at[1], b.at[1]), exact_pairs(a.at[2], b.at[2])}};
  }

 private:
  struct Pieces {
    Block at[3];

    WNFUSED_INLINE explicit Pieces(const Block& a) {
      at[0] = leading_bits(a);
      const Block rest = a - at[0];
      at[1] = leading_bits(rest);
      at[2] = rest - at[1];
    }
  };
};

}  // namespace wnfused::cpu::WNFUSED_ISA

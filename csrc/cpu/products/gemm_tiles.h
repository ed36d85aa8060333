// Products of two matrices on tiles (amx_tiles.h), over the operands of gemm.h: 16 rows of the narrow one are a tile as
// they lie, 16 units of a block of the wide one another.
//
// TileUnits multiplies bfloat16. SplitUnits multiplies floats, each as the sum of three bfloat16, which is exact:
//
//   a b = a0 b0 + (a0 b1 + a1 b0) + (a0 b2 + a1 b1 + a2 b0) + what is left out, 2^-24 a b at most
//
// Six products at a sixteenth of the price of one in float32. Pieces of numbers below 2^-100 would be denormals, which
// tiles take for zero, hence the limits of split_range.h.
//
// 64 rows of TileUnits' narrow operand are 32 KB, which the first level of cache holds; the wide one comes from the
// second, once for all of them.
#pragma once

#include "cpu/products/gemm.h"
#include "cpu/products/pair_amx.h"
#include "cpu/vec/prefetch.h"

namespace wnfused::cpu::WNFUSED_ISA {

// What will be multiplied next, fetched meanwhile.
struct UpcomingOperands {
  Upcoming wide;
  UpcomingRows narrow;

  WNFUSED_INLINE void step() {
    wide.step();
    narrow.step();
  }
};

struct TileUnits : PairRuns {
  static constexpr DepthUnit kUnit{2, tiles::kRows, 128};
  static constexpr int64_t kRows = tiles::kRows;

  static void multiply(const float* narrow, int64_t rows, const float* wide, int64_t wide_stride, int64_t blocks,
                       int64_t units, float* out, int64_t out_stride, int64_t out_col_stride, bool accumulate,
                       UpcomingOperands* upcoming = nullptr) {
    const Segment segment{reinterpret_cast<const uint16_t*>(narrow), reinterpret_cast<const uint16_t*>(wide)};
    const PairProduct product{&segment, 1, 2 * units, 2 * kUnit.chunk, 2 * wide_stride, accumulate};
    int64_t offsets[kNarrowRows / tiles::kRows];
    const int64_t groups = rows / tiles::kRows;
    for (int64_t g = 0; g < groups; ++g) offsets[g] = g * tiles::kRows * product.row_stride;
    UpcomingOperands nothing{};
    StridedSink sink{{out, out_col_stride, out_stride}, upcoming ? *upcoming : nothing};
    Pairs::multiply(product, offsets, groups, blocks, sink);
  }

 private:
  // Sums that stay where they are. Meanwhile something is fetched.
  struct StridedSink {
    static constexpr bool kFinishes = false;

    TileSums sums;
    UpcomingOperands& upcoming;

    WNFUSED_INLINE TileSums place(int64_t group, int64_t, int64_t col, int64_t) const {
      const int64_t row = group * tiles::kRows;
      return {sums.out + col * sums.block_stride + row * sums.row_stride, sums.block_stride, sums.row_stride};
    }
    WNFUSED_INLINE void meanwhile() const { upcoming.step(); }
    WNFUSED_INLINE void ready(const TileSums&, int64_t, int64_t, int64_t, int64_t) const {}
  };
};

WNFUSED_INLINE Block upper_half(const Block& a) {
  Block result;
  WNFUSED_FOR_PARTS result.part[i] = (Native)((NativeBits)a.part[i] & 0xffff0000u);
  return result;
}

// The nearest number of 8 bits; halves away from zero.
WNFUSED_INLINE Block leading_bits(const Block& a) {
  Block result;
  WNFUSED_FOR_PARTS result.part[i] = (Native)((NativeBits)a.part[i] + 0x8000u);
  return upper_half(result);
}

struct SplitUnits {
  static constexpr int kPieces = 3;
  static constexpr DepthUnit kUnit{2, tiles::kRows, 32, kPieces};
  static constexpr int64_t kRows = tiles::kRows;

  static void multiply(const float* narrow, int64_t rows, const float* wide, int64_t wide_stride, int64_t blocks,
                       int64_t units, float* out, int64_t out_stride, int64_t out_col_stride, bool accumulate,
                       UpcomingOperands* upcoming = nullptr) {
    UpcomingOperands nothing{};
    UpcomingOperands& ahead = upcoming ? *upcoming : nothing;
    const int64_t piece = wide_stride / kPieces;
    for (int64_t c = 0; c < blocks; ++c, wide += wide_stride, out += out_col_stride)
      for (int64_t r = 0; r < rows;) {
        const int64_t left = rows - r;
        const int64_t count = left >= 4 * kRows ? 4 : left >= 2 * kRows ? 2 : 1;
        const auto multiply = count == 4 ? multiply_tiles<4> : count == 2 ? multiply_tiles<2> : multiply_tiles<1>;
        multiply(narrow + r * kUnit.chunk, wide, piece, units, out + r * out_stride, out_stride, accumulate, ahead);
        r += count * kRows;
      }
  }

  WNFUSED_INLINE static Packed<kPieces> of_run(const void*, const Block& first, const Block& second) {
    const Split a(first), b(second);
    return {{rounded_run(a.at[0], b.at[0]), rounded_run(a.at[1], b.at[1]), rounded_run(a.at[2], b.at[2])}};
  }

  template <class T>
  WNFUSED_INLINE static Packed<kPieces> along(const Runs<T>& runs, int64_t run, int64_t unit) {
    return of_run(nullptr, runs.entries(run, 2 * unit), runs.entries(run, 2 * unit + kLanes));
  }

  template <class T>
  WNFUSED_INLINE static Packed<kPieces> across(const Runs<T>& runs, int64_t unit, int64_t at) {
    const Split a(runs.entries(2 * unit, at)), b(runs.entries(2 * unit + 1, at));
    return {{exact_pairs(a.at[0], b.at[0]), exact_pairs(a.at[1], b.at[1]), exact_pairs(a.at[2], b.at[2])}};
  }

 private:
  struct Split {
    Block at[kPieces];

    WNFUSED_INLINE explicit Split(const Block& a) {
      at[0] = leading_bits(a);
      const Block rest = a - at[0];
      at[1] = leading_bits(rest);
      at[2] = upper_half(rest - at[1]);  // all of it, unless that is a denormal
    }
  };

  // kTiles x 16 rows by a block. The pieces of the wide operand stay in tiles for all rows: fifteen loads to 24
  // products.
  template <int kTiles>
  static void multiply_tiles(const float* narrow, const float* wide, int64_t wide_piece, int64_t units, float* out,
                             int64_t out_stride, bool accumulate, UpcomingOperands& ahead) {
    using Tiles = WNFUSED_TILES;
    constexpr int kWide = 4, kNarrow = kWide + kPieces;  // tiles; the first ones accumulate
    constexpr int64_t kRowBytes = kUnit.chunk * sizeof(float), kPiece = kNarrowRows * kUnit.chunk;
    const int64_t out_bytes = out_stride * sizeof(float);
    each<kTiles>([&](auto t) {
      if (accumulate) Tiles::template load<t>(out + t * kRows * out_stride, out_bytes);
      else Tiles::template zero<t>();
    });
    for (int64_t u = 0; u < units; u += tiles::kRows, narrow += tiles::kRows, wide += tiles::kRows * kLanes) {
      each<kPieces>([&](auto p) { Tiles::template load<kWide + p>(wide + p * wide_piece, tiles::kRowBytes); });
      each<kTiles>([&](auto t) {
        // The smallest products first.
        each<kPieces>([&](auto i) {
          constexpr int p = kPieces - 1 - i;
          Tiles::template load<kNarrow>(narrow + p * kPiece + t * kRows * kUnit.chunk, kRowBytes);
          each<kPieces - p>([&](auto j) { Tiles::template dot<t, kNarrow, kWide + kPieces - 1 - p - j>(); });
        });
        ahead.step();
      });
    }
    each<kTiles>([&](auto t) { Tiles::template store<t>(out + t * kRows * out_stride, out_bytes); });
  }

  // Calls visit with the constants 0 to kCount - 1.
  template <int kCount, class Visit>
  static WNFUSED_INLINE void each(const Visit& visit) {
    each_of(visit, std::make_integer_sequence<int, kCount>());
  }
  template <class Visit, int... I>
  static WNFUSED_INLINE void each_of(const Visit& visit, std::integer_sequence<int, I...>) {
    (visit(std::integral_constant<int, I>()), ...);
  }
};

}  // namespace wnfused::cpu::WNFUSED_ISA

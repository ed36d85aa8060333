// Products of pairs by AMX: 2 x 2 tiles of 16 rows x 16 lanes are accumulated at a time from 2 + 2 tiles of operands,
// one load to each TDPBF16PS; 4 or 5 x 1 of a single output block or a wide bank; 1 x 3 of a single tile of rows.
// WNFUSED_TILES names the tiles, real or emulated (amx_tiles.h).
//
// Floor: a TDPBF16PS of 16 x 16 x 32 multiply-adds takes 16 cycles, also where it adds to the one before; a TILELOADD
// 8, but about 50 where rows of 64 bytes do not begin a cache line (measured on a Xeon of 2024, bench/NOTES.md).
#pragma once

#include <utility>

#include "cpu/machine/amx_tiles.h"
#include "cpu/products/pairs.h"

namespace wnfused::cpu::WNFUSED_ISA {

class Pairs {
  using Tiles = WNFUSED_TILES;

 public:
  static constexpr PairTile kTile = {tiles::kRows, tiles::kDepth, true};

  // Tiles belong to a thread.
  static void begin() { Tiles::configure({}); }
  static void end() { Tiles::release(); }
  // Between products.
  static void keep_awake() { Tiles::keep_awake(); }

  // Groups of 16 rows, group g at row_offset[g] elements from each segment's rows, times `cols` output blocks.
  template <class Sink>
  static void multiply(const PairProduct& product, const int64_t* row_offset, int64_t groups, int64_t cols,
                       Sink& sink) {
    // A wide bank comes from the second-level cache: many rows read it once, and are read, from nearby, once a block.
    const bool wide = cols >= 4 && groups >= 4;
    const int64_t wide_rows = groups % 5 == 0 ? 5 : 4;
    // The smaller what is summed at once, the better its sink's work overlaps with the next products.
    const bool small = Sink::kFinishes && Tiles::is_contended();
    for (int64_t c = 0; c < cols;) {
      const int64_t left = cols - c;
      if (small && left > 1) {
        for (int64_t g = 0; g < groups; ++g) multiply_tiles<1, 2>(product, row_offset, g, c, sink);
        c += 2;
        continue;
      }
      if (groups == 1) {
        if (left >= 3) c += multiply_tiles<1, 3>(product, row_offset, 0, c, sink);
        else if (left == 2) c += multiply_tiles<1, 2>(product, row_offset, 0, c, sink);
        else c += multiply_tiles<1, 1>(product, row_offset, 0, c, sink);
        continue;
      }
      const bool pairwise = left > 1 && !wide;
      int64_t g = 0;
      if (!pairwise) {
        if (wide_rows == 5)
          for (; g < groups; g += 5) multiply_tiles<5, 1>(product, row_offset, g, c, sink);
        for (; g + 4 <= groups; g += 4) multiply_tiles<4, 1>(product, row_offset, g, c, sink);
      }
      for (; g < groups; g += 2) {
        const bool two_rows = g + 1 < groups;
        if (two_rows && pairwise) multiply_tiles<2, 2>(product, row_offset, g, c, sink);
        else if (two_rows) multiply_tiles<2, 1>(product, row_offset, g, c, sink);
        else if (pairwise) multiply_tiles<1, 2>(product, row_offset, g, c, sink);
        else multiply_tiles<1, 1>(product, row_offset, g, c, sink);
      }
      c += pairwise ? 2 : 1;
    }
  }

 private:
  static float* sum_at(const TileSums& sums, int64_t row, int64_t col) {
    return sums.out + col * sums.block_stride + row * kTile.rows * sums.row_stride;
  }

  // Returns Cols.
  template <int Rows, int Cols, class Sink>
  static int64_t multiply_tiles(const PairProduct& product, const int64_t* row_offset, int64_t group, int64_t col,
                                Sink& sink) {
    // The first tiles accumulate. Operands are loaded into two tiles by turns: the processor renames them.
    constexpr int kA = Rows * Cols, kB = kA + (Rows > 1 ? 2 : 1);
    static_assert(Rows == 1 || Cols <= 2, "a column's operand stays for all rows");
    static_assert(kB + (Cols > 1 ? 2 : 1) <= 8 && Rows * Cols * kTile.rows * kLanes <= kTileSums);
    const TileSums sums = sink.place(group, Rows, col, Cols);
    each_tile<Rows, Cols>([&](auto r, auto c) {
      begin_sum<r * Cols + c>(sum_at(sums, r, c), sums.row_stride, product.accumulate);
    });
    const int64_t row_bytes = product.row_stride * sizeof(uint16_t), next_col = product.bank_stride;
    const int64_t depth = product.depth;
    int64_t offset[Rows];
    for (int r = 0; r < Rows; ++r) offset[r] = row_offset[group + r];
    for (int64_t s = 0; s < product.segment_count; ++s) {
      const uint16_t* rows = product.segments[s].rows;
      const uint16_t* bank = product.segments[s].bank + col * next_col;
      for (int64_t k = 0; k < depth; k += tiles::kDepth, rows += tiles::kDepth, bank += tiles::kDepth * kLanes) {
        // Both columns' operands first: loaded between the products they cost a fifth more.
        if constexpr (Cols <= 2) {
          Tiles::template load<kB>(bank, tiles::kRowBytes);
          if constexpr (Cols == 2) Tiles::template load<kB + 1>(bank + next_col, tiles::kRowBytes);
        }
        each_tile<Rows, Cols>([&](auto r, auto c) {
          if constexpr (Cols > 2) Tiles::template load<kB + c % 2>(bank + c * next_col, tiles::kRowBytes);
          if constexpr (c == 0) Tiles::template load<kA + r % 2>(rows + offset[r], row_bytes);
          Tiles::template dot<r * Cols + c, kA + r % 2, kB + c % 2>();
        });
        sink.meanwhile();
      }
    }
    each_tile<Rows, Cols>([&](auto r, auto c) {
      Tiles::template store<r * Cols + c>(sum_at(sums, r, c), sums.row_stride * sizeof(float));
    });
    sink.ready(sums, group, Rows, col, Cols);
    return Cols;
  }

  // Calls visit(r, c) with constants, row by row.
  template <int Rows, int Cols, class Visit>
  static WNFUSED_INLINE void each_tile(const Visit& visit) {
    each_of(visit, std::make_integer_sequence<int, Rows * Cols>(), std::integral_constant<int, Cols>());
  }
  template <class Visit, int... I, int Cols>
  static WNFUSED_INLINE void each_of(const Visit& visit, std::integer_sequence<int, I...>,
                                     std::integral_constant<int, Cols>) {
    (visit(std::integral_constant<int, I / Cols>(), std::integral_constant<int, I % Cols>()), ...);
  }

  template <int T>
  static void begin_sum(const float* out, int64_t row_stride, bool accumulate) {
    if (accumulate) Tiles::template load<T>(out, row_stride * sizeof(float));
    else Tiles::template zero<T>();
  }
};

}  // namespace wnfused::cpu::WNFUSED_ISA

// Products of pairs by AMX: 2 x 2 tiles of 16 rows x 16 lanes are accumulated at a time from 2 + 2 tiles of operands,
// one load to each TDPBF16PS. WNFUSED_TILES names the tiles, real or emulated (amx_tiles.h).
//
// Floor: a TDPBF16PS of 16 x 16 x 32 multiply-adds takes 16 cycles.
#pragma once

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

  // Groups of 16 rows, group g at row_offset[g] elements from each segment's rows, times `cols` output blocks.
  static void multiply(const PairProduct& product, const int64_t* row_offset, int64_t groups, int64_t cols) {
    for (int64_t c = 0; c < cols; c += 2)
      for (int64_t g = 0; g < groups; g += 2) {
        const bool two_rows = g + 1 < groups, two_cols = c + 1 < cols;
        if (two_rows && two_cols) multiply_tiles<2, 2>(product, row_offset + g, g, c);
        else if (two_rows) multiply_tiles<2, 1>(product, row_offset + g, g, c);
        else if (two_cols) multiply_tiles<1, 2>(product, row_offset + g, g, c);
        else multiply_tiles<1, 1>(product, row_offset + g, g, c);
      }
  }

 private:
  static constexpr int kA = 4, kB = 6;  // the first of the operands' tiles; 0 to 3 accumulate
  static constexpr int64_t kOutBytes = kLanes * sizeof(float);

  template <int Rows, int Cols>
  static void multiply_tiles(const PairProduct& product, const int64_t* row_offset, int64_t group, int64_t col) {
    float* out[Rows][Cols];
    for (int r = 0; r < Rows; ++r)
      for (int c = 0; c < Cols; ++c)
        out[r][c] = product.out + (col + c) * product.out_stride + (group + r) * kTile.rows * kLanes;
    begin_sum<0>(out[0][0], product.accumulate);
    if constexpr (Cols == 2) begin_sum<1>(out[0][1], product.accumulate);
    if constexpr (Rows == 2) begin_sum<2>(out[1][0], product.accumulate);
    if constexpr (Rows == 2 && Cols == 2) begin_sum<3>(out[1][1], product.accumulate);
    const int64_t row_bytes = product.row_stride * sizeof(uint16_t);
    for (int64_t s = 0; s < product.segment_count; ++s) {
      const uint16_t* rows = product.segments[s].rows;
      const uint16_t* bank = product.segments[s].bank + col * product.bank_stride;
      for (int64_t k = 0; k < product.depth; k += tiles::kDepth, rows += tiles::kDepth, bank += tiles::kDepth * kLanes) {
        Tiles::template load<kA>(rows + row_offset[0], row_bytes);
        Tiles::template load<kB>(bank, tiles::kRowBytes);
        Tiles::template dot<0, kA, kB>();
        if constexpr (Cols == 2) {
          Tiles::template load<kB + 1>(bank + product.bank_stride, tiles::kRowBytes);
          Tiles::template dot<1, kA, kB + 1>();
        }
        if constexpr (Rows == 2) {
          Tiles::template load<kA + 1>(rows + row_offset[1], row_bytes);
          Tiles::template dot<2, kA + 1, kB>();
        }
        if constexpr (Rows == 2 && Cols == 2) Tiles::template dot<3, kA + 1, kB + 1>();
      }
    }
    Tiles::template store<0>(out[0][0], kOutBytes);
    if constexpr (Cols == 2) Tiles::template store<1>(out[0][1], kOutBytes);
    if constexpr (Rows == 2) Tiles::template store<2>(out[1][0], kOutBytes);
    if constexpr (Rows == 2 && Cols == 2) Tiles::template store<3>(out[1][1], kOutBytes);
  }

  template <int T>
  static void begin_sum(const float* out, bool accumulate) {
    if (accumulate) Tiles::template load<T>(out, kOutBytes);
    else Tiles::template zero<T>();
  }
};

}  // namespace wnfused::cpu::WNFUSED_ISA

// The two register tiles in which the multiply-adds of float convolutions by planes happen.
//
// rows_tile: rows of a panel times a bank (convolution, forward and data gradient)
//
//      panel block [rows][16]        bank [16 deep][16 lanes], Cols output blocks
//      row r: a0 a1 .. a15           k: w0 .. w15
//                \__ broadcast a_k  x  vector w_k  ->  accumulator [r][col]
//
//   AVX-512 holds 8 rows x 2 blocks (16 of 32 registers, 10 loads to 16 multiply-adds) or 16 x 1; AVX2 6 x 1 (a block
//   is two registers there: 12 accumulators of 16; the 8 of 4 rows are just as many as two ports of a latency of 4 have
//   under way, and fell behind by a third); portable 128-bit vectors 2 x 1 (8 of 16). The last rows of a panel are
//   taken 4 (portable 2) at a time, since a single small image fills no more.
//
// outer_tile: panel transposed times gradient rows (weight gradient); the accumulators stay in registers over a panel
//
//      panel block [rows][16]        gradient [rows][16 lanes], Cols output blocks
//      row t: broadcast a_i       x  vector d_t           ->  accumulator [i][col]
//
// Floor: 16 lanes x 2 FMA ports a cycle on AVX-512, so C^2 x planes / 512 cycles a unit and convolution.
#pragma once

#include <type_traits>

#include "cpu/vec/vec.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Panels are padded with rows of zeros to a multiple of kRowMultiple.
#if WNFUSED_VECTOR_BITS == 512
constexpr int kCols = 2;
constexpr int kPairRows = 8;
constexpr int kSingleRows = 16;
constexpr int kTallRows = 0;
constexpr int kRowMultiple = 4;
#elif WNFUSED_VECTOR_BITS == 256
constexpr int kCols = 1;
constexpr int kPairRows = 4;
constexpr int kSingleRows = 4;
constexpr int kTallRows = 6;  // two of them in place of three tiles
constexpr int kRowMultiple = 4;
#else
constexpr int kCols = 1;
constexpr int kPairRows = 2;
constexpr int kSingleRows = 2;
constexpr int kTallRows = 0;
constexpr int kRowMultiple = 2;
#endif

// tile(kTallRows, r) for the tall tiles, as many pairs as `rows` have room for. Where the next tile begins.
template <class Tile>
WNFUSED_INLINE int64_t for_tall_tiles(int64_t rows, const Tile& tile) {
  if constexpr (kTallRows > 0) {
    const int64_t end = rows / (2 * kTallRows) * (2 * kTallRows);
    for (int64_t r = 0; r < end; r += kTallRows) tile(std::integral_constant<int, kTallRows>{}, r);
    return end;
  }
  return 0;
}

// A plane of the panel and the plane of the bank it meets; a product sums over one of them (Winograd) or several (the
// taps of the direct method).
struct PlanePair {
  const float* panel;  // [depth blocks][rows][16]
  const float* bank;   // [output blocks][depth][16]
};

// The depth of a plane: whole blocks of 16 channels, then the channels of an incomplete one. Padding channels are left
// out of the sum, since their products with an infinity would be NaN.
struct Depth {
  int64_t full_blocks;
  int64_t last_lanes;
  int64_t panel_step;  // floats from one block of the panel to the next
};

template <int Rows, int Cols>
WNFUSED_INLINE void rows_step(const float* operand, const float* weights, int64_t bank_col_stride,
                              Block (&accumulator)[Rows][Cols]) {
  Block weight[Cols];
  WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) weight[c] = load(weights + c * bank_col_stride);
  WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) {
    const Block value = splat(operand[r * kLanes]);
    WNFUSED_UNROLL for (int c = 0; c < Cols; ++c)
      accumulator[r][c] = multiply_add(value, weight[c], accumulator[r][c]);
  }
}

template <int Rows, int Cols>
inline void rows_tile(const PlanePair* planes, int64_t plane_count, const Depth& depth, int64_t panel_offset,
                      int64_t bank_offset, int64_t bank_col_stride, float* product, int64_t product_col_stride) {
  Block accumulator[Rows][Cols];
  WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) {
    WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) accumulator[r][c] = zero();
  }
  for (int64_t p = 0; p < plane_count; ++p) {
    const float* panel = planes[p].panel + panel_offset;
    const float* weights = planes[p].bank + bank_offset;
    for (int64_t b = depth.full_blocks; b > 0; --b, panel += depth.panel_step, weights += kLanes * kLanes) {
      _Pragma("GCC unroll 4") for (int k = 0; k < kLanes; ++k)
        rows_step<Rows, Cols>(panel + k, weights + k * kLanes, bank_col_stride, accumulator);
    }
    for (int64_t k = 0; k < depth.last_lanes; ++k)
      rows_step<Rows, Cols>(panel + k, weights + k * kLanes, bank_col_stride, accumulator);
  }
  WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) {
    WNFUSED_UNROLL for (int c = 0; c < Cols; ++c)
      store(product + c * product_col_stride + r * kLanes, accumulator[r][c]);
  }
}

template <int Rows, int Cols>
inline void multiply_columns(const PlanePair* planes, int64_t plane_count, const Depth& depth, int64_t rows,
                             int64_t bank_offset, int64_t bank_col_stride, float* product, int64_t product_col_stride) {
  int64_t r = for_tall_tiles(rows, [&](auto tall, int64_t row) __attribute__((always_inline)) {
    rows_tile<tall.value, Cols>(planes, plane_count, depth, row * kLanes, bank_offset, bank_col_stride,
                               product + row * kLanes, product_col_stride);
  });
  for (; r + Rows <= rows; r += Rows)
    rows_tile<Rows, Cols>(planes, plane_count, depth, r * kLanes, bank_offset, bank_col_stride, product + r * kLanes,
                          product_col_stride);
  if constexpr (Rows > 2 * kRowMultiple) {
    for (; r + Rows / 2 <= rows; r += Rows / 2)
      rows_tile<Rows / 2, Cols>(planes, plane_count, depth, r * kLanes, bank_offset, bank_col_stride,
                                product + r * kLanes, product_col_stride);
  }
  for (; r < rows; r += kRowMultiple)
    rows_tile<kRowMultiple, Cols>(planes, plane_count, depth, r * kLanes, bank_offset, bank_col_stride,
                                  product + r * kLanes, product_col_stride);
}

// product[col][row] = sum over planes of panel[row] . bank[col], for all `rows` (a multiple of kRowMultiple) and `cols`
// output blocks.
inline void multiply_rows(const PlanePair* planes, int64_t plane_count, const Depth& depth, int64_t rows, int64_t cols,
                          int64_t bank_col_stride, float* product, int64_t product_col_stride) {
  int64_t c = 0;
  if constexpr (kCols == 2) {
    for (; c + 2 <= cols; c += 2)
      multiply_columns<kPairRows, 2>(planes, plane_count, depth, rows, c * bank_col_stride, bank_col_stride,
                                     product + c * product_col_stride, product_col_stride);
  }
  for (; c < cols; ++c)
    multiply_columns<kSingleRows, 1>(planes, plane_count, depth, rows, c * bank_col_stride, bank_col_stride,
                                     product + c * product_col_stride, product_col_stride);
}

template <int Inputs, int Cols>
inline void outer_tile(const float* panel, const float* gradient, int64_t gradient_col_stride, int64_t rows,
                       bool accumulate, float* bank, int64_t bank_col_stride) {
  Block accumulator[Inputs][Cols];
  WNFUSED_UNROLL for (int i = 0; i < Inputs; ++i) {
    WNFUSED_UNROLL for (int c = 0; c < Cols; ++c)
      accumulator[i][c] = accumulate ? load(bank + c * bank_col_stride + i * kLanes) : zero();
  }
  for (int64_t t = 0; t < rows; ++t, panel += kLanes, gradient += kLanes) {
    Block value[Cols];
    WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) value[c] = load(gradient + c * gradient_col_stride);
    WNFUSED_UNROLL for (int i = 0; i < Inputs; ++i) {
      const Block input = splat(panel[i]);
      WNFUSED_UNROLL for (int c = 0; c < Cols; ++c)
        accumulator[i][c] = multiply_add(input, value[c], accumulator[i][c]);
    }
  }
  WNFUSED_UNROLL for (int i = 0; i < Inputs; ++i) {
    WNFUSED_UNROLL for (int c = 0; c < Cols; ++c)
      store(bank + c * bank_col_stride + i * kLanes, accumulator[i][c]);
  }
}

// bank[col][input] = (bank[col][input] if accumulate) + panel[row][input] * gradient[col][row], summed over `rows`, for
// one block of 16 inputs.
inline void multiply_outer(const float* panel, const float* gradient, int64_t gradient_col_stride, int64_t rows,
                           int64_t cols, bool accumulate, float* bank, int64_t bank_col_stride) {
  int64_t c = 0;
  if constexpr (kCols == 2) {
    for (; c + 2 <= cols; c += 2)
      for (int64_t i = 0; i < kLanes; i += kPairRows)
        outer_tile<kPairRows, 2>(panel + i, gradient + c * gradient_col_stride, gradient_col_stride, rows,
                                 accumulate, bank + c * bank_col_stride + i * kLanes, bank_col_stride);
  }
  for (; c < cols; ++c)
    for (int64_t i = 0; i < kLanes; i += kSingleRows)
      outer_tile<kSingleRows, 1>(panel + i, gradient + c * gradient_col_stride, gradient_col_stride, rows,
                                 accumulate, bank + c * bank_col_stride + i * kLanes, bank_col_stride);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

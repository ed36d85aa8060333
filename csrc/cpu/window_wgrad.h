// The weight gradient of a convolution over any window, as a bank: the products of window_conv.h with pixels as depth.
//
//      broadcast channel i of source pixel t, moved by the tap  x  gradient of target pixel t  ->  [tap][i][16 lanes]
//
// Slices, and the order of their sum, are those of stage_wgrad.h.
#pragma once

#include "product_wgrad.h"
#include "window_conv.h"

namespace wnfused::cpu::WNFUSED_ISA {

// bank[col][input] += input of row t * gradient[t][col], over the rows, for `Inputs` channels from each row's pointer.
template <int Inputs, int Cols>
inline void window_outer_tile(const float* const* rows, int64_t offset, const float* const* gradients,
                              int64_t gradient_offset, int64_t count, float* bank, int64_t col_stride) {
  Block accumulator[Inputs][Cols];
  WNFUSED_UNROLL for (int i = 0; i < Inputs; ++i) {
    WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) accumulator[i][c] = load(bank + c * col_stride + i * kLanes);
  }
  for (int64_t t = 0; t < count; ++t) {
    const float *inputs = rows[t] + offset, *gradient = gradients[t] + gradient_offset;
    Block value[Cols];
    WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) value[c] = load(gradient + c * kLanes);
    WNFUSED_UNROLL for (int i = 0; i < Inputs; ++i) {
      const Block input = splat(inputs[i]);
      WNFUSED_UNROLL for (int c = 0; c < Cols; ++c)
        accumulator[i][c] = multiply_add(input, value[c], accumulator[i][c]);
    }
  }
  WNFUSED_UNROLL for (int i = 0; i < Inputs; ++i) {
    WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) store(bank + c * col_stride + i * kLanes, accumulator[i][c]);
  }
}

// Item `item` of the weight gradient of `window`, a forward: one slice of units, one group of output blocks. dy is the
// source of `transposed`: y's map, with the border that the data gradient wants.
inline void window_gradient_item(const Window& window, const Window& transposed, int64_t item, const float* x,
                                 const float* dy, float* banks, float* bias_gradients, float* scratch) {
  if (window.has_product_gradient()) return product_gradient_item(window, item, x, dy, banks, bias_gradients, scratch);
  const auto [slice, group] = window.wgrad_item(item);
  const int64_t first_block = group * window.wgrad_group_blocks;
  const int64_t blocks = smaller(window.wgrad_group_blocks, window.output_blocks - first_block);
  const int64_t pixel = window.source.padded_channels, col_stride = window.block_floats();
  float* bank = banks + slice * window.gradient_size() + first_block * col_stride;
  float* bias_gradient = bias_gradients + slice * window.padded_outputs + first_block * kLanes;
  for (int64_t p = 0; p < window.planes; ++p)
    __builtin_memset(bank + p * window.plane_stride, 0, blocks * col_stride * sizeof(float));
  Block sum[kMaxGroupBlocks];
  for (Block& block : sum) block = zero();

  const Grid& grid = window.grids[0];
  const int64_t begin = slice * window.wgrad_slice_units, width = window.target.width;
  const int64_t end = smaller(begin + window.wgrad_slice_units, window.units(grid));
  for (int64_t first = begin; first < end; first += window.wgrad_rows) {
    Units units;
    locate_units(window, grid, x, first, smaller(window.wgrad_rows, end - first), units);
    const float* gradients[kMaxPanelRows];
    for (int64_t t = 0; t < units.count; ++t) {
      const int64_t line = units.target[t] / width, column = units.target[t] % width;
      gradients[t] = dy + transposed.padded_index(line, column) * window.padded_outputs + first_block * kLanes;
      for (int64_t b = 0; b < blocks; ++b) sum[b] = sum[b] + load(gradients[t] + b * kLanes);
    }
    for (int64_t k = 0; k < grid.taps; ++k) {
      const Tap& tap = window.taps[k];
      if (!touches(window, units, tap)) continue;
      const int64_t offset = (tap.row * window.pitch + tap.column) * pixel;
      float* plane = bank + tap.plane * window.plane_stride;
      for (int64_t b = 0; b < blocks;) {
        const bool pair = kCols == 2 && takes_pair(window, first_block + b, blocks - b);
        const auto run = pair ? window_outer_tile<kPairRows, kCols> : window_outer_tile<kPairRows, 1>;
        const int64_t first = offset + window.first_channel(first_block + b);
        for (int64_t i = 0; i < window.bank_depth; i += kPairRows)
          run(units.source, first + i, gradients, b * kLanes, units.count, plane + b * col_stride + i * kLanes,
              col_stride);
        b += pair ? kCols : 1;
      }
    }
  }
  for (int64_t b = 0; b < blocks; ++b) store(bias_gradient + b * kLanes, sum[b]);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

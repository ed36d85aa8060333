// The weight gradient of a convolution over any window, as a bank: the products of window_conv.h with pixels as depth.
//
//      broadcast channel i of source pixel t, moved by the tap  x  gradient of target pixel t  ->  [tap][i][16 lanes]
//
// Slices, and the order of their sum, are those of stage_wgrad.h.
#pragma once

#include "product_wgrad.h"
#include "window_conv.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Which inputs a tile sums up: where they are from each row's pointer, and their place in the bank. A run of channels ..
struct ChannelRun {
  int64_t first;
  float* bank;

  int64_t input(int i) const { return first + i; }
  float* place(int i) const { return bank + i * kLanes; }
};

// .. or any of a thin source. What fills up a tile is the last one again, whose place gets the same sum.
struct Entries {
  int64_t first[kPairRows];
  float* bank[kPairRows];

  int64_t input(int i) const { return first[i]; }
  float* place(int i) const { return bank[i]; }
};

// place(i)[col] += input(i) of row t * gradient[t][col], over the rows.
template <int Inputs, int Cols, class Tile>
inline void window_outer_tile(const float* const* rows, const Tile& tile, const float* const* gradients,
                              int64_t gradient_offset, int64_t count, int64_t col_stride) {
  Block accumulator[Inputs][Cols];
  WNFUSED_UNROLL for (int i = 0; i < Inputs; ++i) {
    WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) accumulator[i][c] = load(tile.place(i) + c * col_stride);
  }
  for (int64_t t = 0; t < count; ++t) {
    const float *inputs = rows[t], *gradient = gradients[t] + gradient_offset;
    Block value[Cols];
    WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) value[c] = load(gradient + c * kLanes);
    WNFUSED_UNROLL for (int i = 0; i < Inputs; ++i) {
      const Block input = splat(inputs[tile.input(i)]);
      WNFUSED_UNROLL for (int c = 0; c < Cols; ++c)
        accumulator[i][c] = multiply_add(input, value[c], accumulator[i][c]);
    }
  }
  WNFUSED_UNROLL for (int i = 0; i < Inputs; ++i) {
    WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) store(tile.place(i) + c * col_stride, accumulator[i][c]);
  }
}

// The rows of a panel, and of their gradients the output blocks from `first_block` on.
struct PanelGradient {
  const Units& units;
  const float* const* gradients;
  int64_t first_block, blocks;
};

// Adds a panel to the bank of its output blocks, tap by tap ..
inline void add_panel(const Window& window, const PanelGradient& panel, float* bank) {
  const int64_t col_stride = window.block_floats();
  // Nothing is read beyond the channels of a pixel, unless there are zeros.
  const bool padded = window.pixel == window.source.padded_channels;
  const int64_t whole = padded ? window.depth : window.depth / kPairRows * kPairRows;
  for (int64_t k = 0; k < window.grids[0].taps; ++k) {
    const Tap& tap = window.taps[k];
    if (!touches(window, panel.units, tap)) continue;
    const int64_t offset = window.tap_offset(tap) * window.pixel;
    float* plane = bank + tap.plane * window.plane_stride;
    for (int64_t b = 0; b < panel.blocks;) {
      const bool pair = kCols == 2 && takes_pair(window, panel.first_block + b, panel.blocks - b);
      const auto run = pair ? window_outer_tile<kPairRows, kCols, ChannelRun> : window_outer_tile<kPairRows, 1, ChannelRun>;
      const int64_t first = offset + window.first_channel(panel.first_block + b);
      float* bank0 = plane + b * col_stride;
      for (int64_t i = 0; i < whole; i += kPairRows)
        run(panel.units.source, {first + i, bank0 + i * kLanes}, panel.gradients, b * kLanes, panel.units.count,
            col_stride);
      if (whole < window.depth) {
        Entries rest;
        for (int64_t i = 0; i < kPairRows; ++i) {
          const int64_t channel = smaller(whole + i, window.depth - 1);
          rest.first[i] = first + channel;
          rest.bank[i] = bank0 + channel * kLanes;
        }
        const auto run = pair ? window_outer_tile<kPairRows, kCols, Entries> : window_outer_tile<kPairRows, 1, Entries>;
        run(panel.units.source, rest, panel.gradients, b * kLanes, panel.units.count, col_stride);
      }
      b += pair ? kCols : 1;
    }
  }
}

// .. or so many entries at a time, of whatever taps.
inline void add_thin_panel(const Window& window, const PanelGradient& panel, float* bank) {
  const int64_t col_stride = window.block_floats();
  Entries entries;
  int filled = 0;
  const auto flush = [&] {
    if (filled == 0) return;
    for (; filled < kPairRows; ++filled) {
      entries.first[filled] = entries.first[filled - 1];
      entries.bank[filled] = entries.bank[filled - 1];
    }
    filled = 0;
    for (int64_t b = 0; b < panel.blocks;) {
      const bool pair = kCols == 2 && panel.blocks - b >= 2;
      const auto run = pair ? window_outer_tile<kPairRows, kCols, Entries> : window_outer_tile<kPairRows, 1, Entries>;
      run(panel.units.source, entries, panel.gradients, b * kLanes, panel.units.count, col_stride);
      const int64_t done = pair ? kCols : 1;
      for (float*& place : entries.bank) place += done * col_stride;
      b += done;
    }
  };
  for (int64_t k = 0; k < window.grids[0].taps; ++k) {
    const Tap& tap = window.taps[k];
    if (!touches(window, panel.units, tap)) continue;
    const int64_t offset = window.tap_offset(tap) * window.pixel;
    for (int64_t i = 0; i < window.depth; ++i) {
      entries.first[filled] = offset + i;
      entries.bank[filled] = bank + tap.plane * window.plane_stride + i * kLanes;
      if (++filled == kPairRows) flush();
    }
  }
  flush();
}

// Item `item` of the weight gradient of `window`, a forward: one slice of units, one group of output blocks. dy is the
// source of `transposed`: y's map, with the border that the data gradient wants.
inline void window_gradient_item(const Window& window, const Window& transposed, int64_t item, const float* x,
                                 const float* dy, float* banks, float* bias_gradients, float* scratch) {
  if (window.has_product_gradient()) return product_gradient_item(window, item, x, dy, banks, bias_gradients, scratch);
  const auto [slice, group] = window.wgrad_item(item);
  const int64_t first_block = group * window.wgrad_group_blocks;
  const int64_t blocks = smaller(window.wgrad_group_blocks, window.output_blocks - first_block);
  const int64_t col_stride = window.block_floats();
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
    const PanelGradient panel{units, gradients, first_block, blocks};
    if (window.thin || window.depth < kThin) add_thin_panel(window, panel, bank);
    else add_panel(window, panel, bank);
  }
  for (int64_t b = 0; b < blocks; ++b) store(bias_gradient + b * kLanes, sum[b]);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

// The weight gradient of a convolution over any window, as a bank: the products of conv.h with pixels as depth.
//
//      broadcast channel i of source pixel t, moved by the tap  x  gradient of target pixel t  ->  [tap][i][16 lanes]
//
// Slices, and the order of their sum, are those of conv3x3/wgrad.h.
#pragma once

#include "cpu/window/conv.h"
#include "cpu/window/product_wgrad.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Which inputs of row t a tile sums up, and their place in the bank: a run of channels.
struct ChannelRun {
  const float* const* rows;
  int64_t first;
  float* bank;

  float input(int64_t t, int i) const { return rows[t][first + i]; }
  float* place(int i) const { return bank + i * kLanes; }
};

// The same for any entries of any taps. The last one fills up the tile: its place gets the same sum again.
struct Entries {
  const float* const* rows[kPairRows];
  int64_t first[kPairRows];
  float* bank[kPairRows];

  float input(int64_t t, int i) const { return rows[i][t][first[i]]; }
  float* place(int i) const { return bank[i]; }
};

// place(i)[col] += input(t, i) * gradient[t][col], over the rows t.
template <int Inputs, int Cols, class Tile>
inline void window_outer_tile(const Tile& tile, const float* const* gradients, int64_t gradient_offset, int64_t count,
                              int64_t col_stride) {
  Block accumulator[Inputs][Cols];
  WNFUSED_UNROLL for (int i = 0; i < Inputs; ++i) {
    WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) accumulator[i][c] = load(tile.place(i) + c * col_stride);
  }
  for (int64_t t = 0; t < count; ++t) {
    const float* gradient = gradients[t] + gradient_offset;
    Block value[Cols];
    WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) value[c] = load(gradient + c * kLanes);
    WNFUSED_UNROLL for (int i = 0; i < Inputs; ++i) {
      const Block input = splat(tile.input(t, i));
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

// How many of a panel's blocks from `b` on a tile takes.
WNFUSED_INLINE int64_t tile_blocks(const Window& window, const PanelGradient& panel, int64_t b) {
  return kCols == 2 && takes_pair(window, panel.first_block + b, panel.blocks - b) ? kCols : 1;
}

// The rows of a panel that meet a pixel at a tap, and the gradients of these. `places`, `gradients`: memory for
// pointers.
struct MetRows {
  const float* const *rows, *const *gradients;
  int64_t offset, count;
};

WNFUSED_INLINE MetRows rows_that_meet(const Window& window, const PanelGradient& panel, const Tap& tap,
                                      const float** places, const float** gradients) {
  const Units& units = panel.units;
  const int64_t offset = window.tap_offset(tap) * window.pixel;
  if (all_meet(window, units, tap)) return {units.source, panel.gradients, offset, units.count};
  const Meeting meeting(window, units, tap);
  int64_t count = 0;
  for (int64_t t = 0; t < units.count; ++t) {
    places[count] = units.source[t];
    gradients[count] = panel.gradients[t];
    count += meeting.is_inside(t);
  }
  return {places, gradients, offset, count};
}

// Adds a panel to the bank of its output blocks, tap by tap.
inline void add_panel(const Window& window, const PanelGradient& panel, float* bank) {
  const int64_t col_stride = window.block_floats();
  // Nothing is read beyond the channels of a pixel, or of a group, unless there are zeros.
  const bool padded = window.groups == 1 && window.pixel == window.source.padded_channels;
  const int64_t whole = padded ? window.depth : window.depth / kPairRows * kPairRows;
  for (int64_t k = 0; k < window.grids[0].taps; ++k) {
    const Tap& tap = window.taps[k];
    if (!touches(window, panel.units, tap)) continue;
    const float *places[kMaxPanelRows], *gradients[kMaxPanelRows];
    const MetRows met = rows_that_meet(window, panel, tap, places, gradients);
    float* plane = bank + tap.plane * window.plane_stride;
    for (int64_t b = 0, taken; b < panel.blocks; b += taken) {
      taken = tile_blocks(window, panel, b);
      const auto run = taken > 1 ? window_outer_tile<kPairRows, kCols, ChannelRun>
                                 : window_outer_tile<kPairRows, 1, ChannelRun>;
      const int64_t first = met.offset + window.first_channel(panel.first_block + b);
      float* bank0 = plane + b * col_stride;
      for (int64_t i = 0; i < whole; i += kPairRows)
        run({met.rows, first + i, bank0 + i * kLanes}, met.gradients, b * kLanes, met.count, col_stride);
      if (whole < window.depth) {
        Entries rest;
        for (int64_t i = 0; i < kPairRows; ++i) {
          const int64_t channel = smaller(whole + i, window.depth - 1);
          rest.rows[i] = met.rows;
          rest.first[i] = first + channel;
          rest.bank[i] = bank0 + channel * kLanes;
        }
        const auto run = taken > 1 ? window_outer_tile<kPairRows, kCols, Entries>
                                   : window_outer_tile<kPairRows, 1, Entries>;
        run(rest, met.gradients, b * kLanes, met.count, col_stride);
      }
    }
  }
}

// The same where few channels are summed over: a tile of entries at a time, of whatever taps.
inline void add_entries(const Window& window, const PanelGradient& panel, const float* zeros, float* bank) {
  const int64_t col_stride = window.block_floats();
  Entries entries;
  int filled = 0;
  const auto flush = [&] {
    if (filled == 0) return;
    for (; filled < kPairRows; ++filled) {
      entries.rows[filled] = entries.rows[filled - 1];
      entries.first[filled] = entries.first[filled - 1];
      entries.bank[filled] = entries.bank[filled - 1];
    }
    filled = 0;
    for (int64_t b = 0, taken; b < panel.blocks; b += taken) {
      taken = tile_blocks(window, panel, b);
      Entries moved = entries;
      for (int i = 0; i < kPairRows; ++i) {
        moved.first[i] += window.first_channel(panel.first_block + b);
        moved.bank[i] += b * col_stride;
      }
      const auto run = taken > 1 ? window_outer_tile<kPairRows, kCols, Entries>
                                 : window_outer_tile<kPairRows, 1, Entries>;
      run(moved, panel.gradients, b * kLanes, panel.units.count, col_stride);
    }
  };
  // Of the taps whose entries are not summed yet.
  const float* places[kPairRows + 1][kMaxPanelRows];
  int64_t met = 0;
  for (int64_t k = 0; k < window.grids[0].taps; ++k) {
    const Tap& tap = window.taps[k];
    if (!touches(window, panel.units, tap)) continue;
    const TapRows at = tap_rows(window, panel.units, tap, zeros, places[met++ % (kPairRows + 1)]);
    for (int64_t i = 0; i < window.depth; ++i) {
      entries.rows[filled] = at.rows;
      entries.first[filled] = at.offset + i;
      entries.bank[filled] = bank + tap.plane * window.plane_stride + i * kLanes;
      if (++filled == kPairRows) flush();
    }
  }
  flush();
}

// Item `item` of the weight gradient of `window`, a forward: one slice of units, one bundle of output blocks. dy is y's
// map.
inline void window_gradient_item(const Window& window, int64_t item, const float* x, const float* dy,
                                 const float* zeros, float* banks, float* bias_gradients, float* scratch,
                                 std::atomic<bool>& poisoned) {
  if (window.has_product_gradient()) return product_gradient_item(window, item, x, dy, banks, bias_gradients, scratch);
  const auto [slice, bundle] = window.wgrad_item(item);
  const int64_t first_block = bundle * window.wgrad_bundle_blocks;
  const int64_t blocks = smaller(window.wgrad_bundle_blocks, window.output_blocks - first_block);
  const int64_t col_stride = window.block_floats();
  float* bank = banks + slice * window.gradient_size() + first_block * col_stride;
  float* bias_gradient = bias_gradients + slice * window.padded_outputs + first_block * kLanes;
  for (int64_t p = 0; p < window.planes; ++p)
    __builtin_memset(bank + p * window.plane_stride, 0, blocks * col_stride * sizeof(float));
  Block sum[kMaxBundleBlocks];
  for (Block& block : sum) block = zero();

  const Grid& grid = window.grids[0];
  const int64_t begin = slice * window.wgrad_slice_units;
  const int64_t end = smaller(begin + window.wgrad_slice_units, window.units(grid));
  for (int64_t first = begin; first < end; first += window.wgrad_rows) {
    Units units;
    locate_units(window, grid, x, first, smaller(window.wgrad_rows, end - first), units);
    const float* gradients[kMaxPanelRows];
    Block panel_sum[kMaxBundleBlocks];
    for (Block& block : panel_sum) block = zero();
    for (int64_t t = 0; t < units.count; ++t) {
      gradients[t] = dy + units.target[t] * window.padded_outputs + first_block * kLanes;
      for (int64_t b = 0; b < blocks; ++b) panel_sum[b] = panel_sum[b] + load(gradients[t] + b * kLanes);
    }
    for (int64_t b = 0; b < blocks; ++b) sum[b] = sum[b] + panel_sum[b];
    const PanelGradient panel{units, gradients, first_block, blocks};
    if (window.thin || window.depth < kThin) add_entries(window, panel, zeros, bank);
    else add_panel(window, panel, bank);
  }
  // A row that meets no pixel is in no product, finite or not.
  Block poison = zero();
  for (int64_t b = 0; b < blocks; ++b) {
    store(bias_gradient + b * kLanes, sum[b]);
    poison = multiply_add(sum[b], zero(), poison);
  }
  if (sum_of(poison) != 0.0f) poisoned.store(true, std::memory_order_relaxed);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

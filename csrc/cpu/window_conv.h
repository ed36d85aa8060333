// A convolution over any window (window.h), by register tiles that read the map where it lies.
//
//   row r of a tile: the channels of source pixel r, moved by the tap    bank [tap][output block][channel][16 lanes]
//        broadcast channel k     x     vector k of the bank   ->   accumulator [r][output block]
//
// Floor: C taps multiply-adds a pixel and output.
#pragma once

#include "conv_layer.h"
#include "stage_gemm.h"
#include "window_source.h"

namespace wnfused::cpu::WNFUSED_ISA {

// The units of a panel: where their channels lie in the source, before a tap's offset, and which pixels of the target
// they are. Rows up to a multiple of kRowMultiple repeat the first one.
struct Units {
  int64_t count;
  const float* source[kMaxPanelRows];
  int64_t target[kMaxPanelRows];
  Pair low, high;  // least and greatest row and column in the source
};

inline void locate_units(const Window& window, const Grid& grid, const float* map, int64_t first, int64_t count,
                         Units& units) {
  const int64_t images = window.target.images, positions = grid.rows * grid.columns;
  const int64_t padded_image = window.padded_pixels(), channels = window.source.padded_channels;
  int64_t image, position;
  if (window.by_position) image = first % images, position = first / images;
  else image = first / positions, position = first % positions;
  int64_t i = position / grid.columns, j = position % grid.columns;
  units.count = count;
  units.low = {i * window.source_step.row, j * window.source_step.column};
  units.high = units.low;
  const auto next_position = [&] {
    if (++j < grid.columns) return true;
    j = 0;
    if (++i < grid.rows) return true;
    i = 0;
    return false;
  };
  for (int64_t t = 0; t < count; ++t) {
    const int64_t row = i * window.source_step.row, column = j * window.source_step.column;
    const int64_t line = (row + window.before.row) * window.pitch;
    units.source[t] = map + (image * padded_image + line + window.before.column + column) * channels;
    units.target[t] = (image * window.target.height + grid.origin.row + i * window.target_step.row) *
                          window.target.width +
                      grid.origin.column + j * window.target_step.column;
    units.low = {smaller(units.low.row, row), smaller(units.low.column, column)};
    units.high = {-smaller(-units.high.row, -row), -smaller(-units.high.column, -column)};
    if (window.by_position) {
      if (++image < images) continue;
      image = 0;
      next_position();
    } else if (!next_position()) {
      ++image;
    }
  }
  for (int64_t t = count; t < round_up_rows(count); ++t) units.source[t] = units.source[0];
}

// Whether some unit may meet a pixel of the map there, not only the border.
WNFUSED_INLINE bool touches(const Window& window, const Units& units, const Tap& tap) {
  return units.high.row + tap.row >= 0 && units.low.row + tap.row < window.source.height &&
         units.high.column + tap.column >= 0 && units.low.column + tap.column < window.source.width;
}

// A tap that a panel meets: from a unit's own place to the tap's, in floats, and the tap's plane of the bank.
struct Met {
  int64_t offset;
  const float* bank;
};

template <int Rows, int Cols>
inline void window_tile(const float* const* rows, int64_t first_channel, const Met* taps, int64_t tap_count,
                        int64_t channels, int64_t bank_offset, int64_t col_stride, float* product,
                        int64_t product_col_stride) {
  Block accumulator[Rows][Cols];
  WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) {
    WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) accumulator[r][c] = zero();
  }
  for (int64_t p = 0; p < tap_count; ++p) {
    const float* at[Rows];
    WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) at[r] = rows[r] + (taps[p].offset + first_channel);
    const float* weights = taps[p].bank + bank_offset;
    _Pragma("GCC unroll 4") for (int64_t k = 0; k < channels; ++k, weights += kLanes) {
      Block weight[Cols];
      WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) weight[c] = load(weights + c * col_stride);
      WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) {
        const Block value = splat(at[r][k]);
        WNFUSED_UNROLL for (int c = 0; c < Cols; ++c)
          accumulator[r][c] = multiply_add(value, weight[c], accumulator[r][c]);
      }
    }
  }
  WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) {
    WNFUSED_UNROLL for (int c = 0; c < Cols; ++c)
      store(product + c * product_col_stride + r * kLanes, accumulator[r][c]);
  }
}

// Whether, of so many output blocks, the first two can share a tile: they sum over the same channels.
WNFUSED_INLINE bool takes_pair(const Window& window, int64_t output_block, int64_t blocks) {
  return blocks >= 2 && output_block % window.group_blocks + 2 <= window.group_blocks;
}

// A pointer to each row wants a register, so there are no taller tiles.
template <int Cols>
inline void window_columns(const Units& units, int64_t first_channel, const Met* taps, int64_t tap_count,
                           int64_t channels, int64_t bank_offset, int64_t col_stride, float* product,
                           int64_t product_col_stride) {
  const int64_t rows = round_up_rows(units.count);
  int64_t r = 0;
  for (; r + kPairRows <= rows; r += kPairRows)
    window_tile<kPairRows, Cols>(units.source + r, first_channel, taps, tap_count, channels, bank_offset, col_stride,
                                 product + r * kLanes, product_col_stride);
  for (; r < rows; r += kRowMultiple)
    window_tile<kRowMultiple, Cols>(units.source + r, first_channel, taps, tap_count, channels, bank_offset, col_stride,
                                    product + r * kLanes, product_col_stride);
}

// What a window's items read and write. Maps in another layout than the kernels' are converted panel by panel where the
// units are pixels in order (`given` in place of `own`).
struct WindowMaps {
  const LayerMap &source, &target, &residual;
  const float* bias;
  Activation activation;
  float slope;
};

// Blocks [first, first + blocks) of a map's channels, as if there were no others.
inline MapShape some_blocks(const MapShape& shape, int64_t first, int64_t blocks) {
  MapShape some = shape;
  some.channels = smaller(shape.channels - first * kLanes, blocks * kLanes);
  some.channel_blocks = blocks;
  some.padded_channels = blocks * kLanes;
  return some;
}

inline ExternalMap some_blocks(const ExternalMap& map, int64_t first) {
  ExternalMap some = map;
  some.data = static_cast<float*>(map.data) + first * kLanes * map.channel_stride;
  return some;
}

// Calls use(run, row) for the pieces of `count` pixels from number `first` on that lie in one image each; `row` counts
// from `first`.
template <class Use>
WNFUSED_INLINE void for_images(const MapShape& shape, int64_t first, int64_t count, const Use& use) {
  const int64_t pixels = shape.height * shape.width;
  for (int64_t row = 0; row < count;) {
    const int64_t image = (first + row) / pixels, begin = (first + row) % pixels;
    const int64_t end = smaller(pixels, begin + count - row);
    use(PixelRun{image, begin, end}, row);
    row += end - begin;
  }
}

// The end of a panel whose units are pixels in order: product [block][rows][16] to the caller's map.
inline void finish_run(const Window& window, const WindowMaps& maps, const Units& units, int64_t first_block,
                       int64_t blocks, const float* product, float* scratch, Block& poison) {
  const MapShape some = some_blocks(window.target, first_block, blocks);
  const int64_t channels = some.padded_channels, first = units.target[0], rows = window.conv_rows;
  float *values = scratch, *added = values + rows * channels;
  const bool residual = maps.residual.given.data != nullptr;
  if (residual)
    for_images(window.target, first, units.count, [&](const PixelRun& run, int64_t row) {
      read_pixels(some, some_blocks(maps.residual.given, first_block), run, added + row * channels);
    });
  for (int64_t b = 0; b < blocks; ++b) {
    const Block bias = maps.bias ? load(maps.bias + (first_block + b) * kLanes) : zero();
    for (int64_t t = 0; t < units.count; ++t) {
      const int64_t at = t * channels + b * kLanes;
      Block value = load(product + (b * rows + t) * kLanes) + bias;
      if (residual) value = load(added + at) + value;
      poison = multiply_add(value, zero(), poison);
      store(values + at, activated(value, maps.activation, maps.slope));
    }
  }
  for_images(window.target, first, units.count, [&](const PixelRun& run, int64_t row) {
    write_pixels(some, values + row * channels, run, some_blocks(maps.target.given, first_block));
  });
}

// The end of any other panel.
inline void finish_pixels(const Window& window, const WindowMaps& maps, const Units& units, int64_t first_block,
                          int64_t blocks, const float* product, Block& poison) {
  Epilogue<float> epilogue{};
  epilogue.operand = maps.target.own;
  epilogue.other = maps.residual.own;
  epilogue.activation = maps.activation;
  epilogue.factor = maps.slope;
  for (int64_t b = 0; b < blocks; ++b) {
    const Block bias = maps.bias ? load(maps.bias + (first_block + b) * kLanes) : zero();
    for (int64_t t = 0; t < units.count; ++t)
      finish_pixel<Ending::kLayer>(window, epilogue, units.target[t], first_block + b,
                                   load(product + (b * window.conv_rows + t) * kLanes), bias, poison);
  }
}

// Item `item`: one chunk of a grid's units, one group of output blocks.
inline void window_item(const Window& window, int64_t item, const WindowMaps& maps, const float* bank, float* scratch,
                        std::atomic<bool>& poisoned) {
  const auto [chunk, group] = window.conv_item(item);
  int64_t index = window.grid_count - 1;
  while (window.grids[index].first_chunk > chunk) --index;
  const Grid& grid = window.grids[index];
  const int64_t first = (chunk - grid.first_chunk) * window.conv_rows, first_block = group * window.conv_group_blocks;
  const int64_t blocks = smaller(window.conv_group_blocks, window.output_blocks - first_block);
  const int64_t channels = window.source.padded_channels, col_stride = window.block_floats();
  float *product = scratch, *panel = product + window.conv_group_blocks * window.conv_rows * kLanes;
  Units units;
  const float* source = maps.source.own ? maps.source.own : panel;
  locate_units(window, grid, source, first, smaller(window.conv_rows, window.units(grid) - first), units);
  if (source == panel) {
    for_images(window.source, first, units.count, [&](const PixelRun& run, int64_t row) {
      read_pixels(window.source, maps.source.given, run, panel + row * channels);
    });
    for (int64_t t = 0; t < round_up_rows(units.count); ++t)
      units.source[t] = panel + smaller(t, units.count - 1) * channels;
  }
  Met met[kMaxWindowTaps];
  int64_t count = 0;
  for (int64_t k = 0; k < grid.taps; ++k) {
    const Tap& tap = window.taps[grid.first_tap + k];
    if (touches(window, units, tap))
      met[count++] = {(tap.row * window.pitch + tap.column) * channels, bank + tap.plane * window.plane_stride};
  }
  const int64_t product_stride = window.conv_rows * kLanes;
  for (int64_t b = 0; b < blocks;) {
    const int64_t block = first_block + b, first_channel = window.first_channel(block), weights = block * col_stride;
    const bool pair = kCols == 2 && takes_pair(window, block, blocks - b);
    float* target = product + b * product_stride;
    const auto run = pair ? window_columns<kCols> : window_columns<1>;
    run(units, first_channel, met, count, window.depth, weights, col_stride, target, product_stride);
    b += pair ? kCols : 1;
  }
  Block poison = zero();
  if (maps.target.own) finish_pixels(window, maps, units, first_block, blocks, product, poison);
  else
    finish_run(window, maps, units, first_block, blocks, product, panel + window.conv_rows * channels, poison);
  if (horizontal_sum(poison) != 0.0f) poisoned.store(true, std::memory_order_relaxed);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

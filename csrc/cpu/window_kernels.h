// A convolution over any window (window.h), by register tiles that read the map where it lies.
//
//   row r of a tile: the channels of source pixel r, moved by the tap    bank [tap][output block][channel][16 lanes]
//        broadcast channel k     x     vector k of the bank   ->   accumulator [r][output block]
//
// The source has a border of zeros as wide as the taps reach beyond it, so that no tap asks where it is. Weight
// gradients are the same products with the pixels as depth.
//
// Floor: C taps multiply-adds a pixel and output.
#pragma once

#include "conv_layer.h"
#include "stage_gemm.h"
#include "stage_maps.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Calls use(run, map) for the pieces of a run that lie in one line each: pixels of the image, and where they are in the
// source.
template <class Use>
WNFUSED_INLINE void for_lines(const Window& window, const PixelRun& run, float* map, const Use& use) {
  const MapShape& shape = window.source;
  for (int64_t pixel = run.begin; pixel < run.end;) {
    const int64_t line = pixel / shape.width, end = smaller((line + 1) * shape.width, run.end);
    use(PixelRun{run.image, pixel, end},
        map + window.padded_index(run.image * shape.height + line, pixel % shape.width) * shape.padded_channels);
    pixel = end;
  }
}

inline void clear_border(const Window& window, int64_t image, float* map) {
  const MapShape& shape = window.source;
  const int64_t channels = shape.padded_channels, line = window.pitch * channels;
  float* target = map + image * window.padded_pixels() * channels;
  const auto clear = [](float* first, int64_t floats) { __builtin_memset(first, 0, floats * sizeof(float)); };
  clear(target, window.before.row * line);
  target += window.before.row * line;
  for (int64_t row = 0; row < shape.height; ++row, target += line) {
    clear(target, window.before.column * channels);
    clear(target + line - window.after.column * channels, window.after.column * channels);
  }
  clear(target, window.after.row * line);
}

// Pixels that lie one after another, into the source. The first run of an image makes its border.
inline void put_pixels(const Window& window, const PixelRun& run, const float* pixels, float* map) {
  const int64_t channels = window.source.padded_channels;
  if (run.begin == 0) clear_border(window, run.image, map);
  for_lines(window, run, map, [&](const PixelRun& piece, float* target) {
    __builtin_memcpy(target, pixels + (piece.begin - run.begin) * channels,
                     (piece.end - piece.begin) * channels * sizeof(float));
  });
}

// Item `item` of the source's pixels. `scratch`: kMapPixels pixels.
inline void read_source(const Window& window, const ExternalMap& given, int64_t item, float* map, float* scratch) {
  const MapShape& shape = window.source;
  if (!window.has_border()) return read_map(shape, given, item, map);
  const PixelRun run = map_run(shape, item);
  if (interleaved(given)) {
    if (run.begin == 0) clear_border(window, run.image, map);
    for_lines(window, run, map,
              [&](const PixelRun& piece, float* target) { read_pixels(shape, given, piece, target); });
  } else {
    read_pixels(shape, given, run, scratch);
    put_pixels(window, run, scratch, map);
  }
}

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
    units.source[t] =
        map + (image * padded_image + (row + window.before.row) * window.pitch + column + window.before.column) * channels;
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
inline void window_tile(const float* const* rows, const Met* taps, int64_t tap_count, int64_t channels,
                        int64_t bank_offset, int64_t col_stride, float* product, int64_t product_col_stride) {
  Block accumulator[Rows][Cols];
  WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) {
    WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) accumulator[r][c] = zero();
  }
  for (int64_t p = 0; p < tap_count; ++p) {
    const float* at[Rows];
    WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) at[r] = rows[r] + taps[p].offset;
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

// A pointer to each row wants a register, so there are no taller tiles.
template <int Cols>
inline void window_columns(const Units& units, const Met* taps, int64_t tap_count, int64_t channels,
                           int64_t bank_offset, int64_t col_stride, float* product, int64_t product_col_stride) {
  const int64_t rows = round_up_rows(units.count);
  int64_t r = 0;
  for (; r + kPairRows <= rows; r += kPairRows)
    window_tile<kPairRows, Cols>(units.source + r, taps, tap_count, channels, bank_offset, col_stride,
                                 product + r * kLanes, product_col_stride);
  for (; r < rows; r += kRowMultiple)
    window_tile<kRowMultiple, Cols>(units.source + r, taps, tap_count, channels, bank_offset, col_stride,
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
  const int64_t channels = window.source.padded_channels, col_stride = channels * kLanes;
  float *product = scratch, *panel = product + window.conv_group_blocks * window.conv_rows * kLanes;
  Units units;
  const float* source = maps.source.own ? maps.source.own : panel;
  locate_units(window, grid, source, first, smaller(window.conv_rows, window.units(grid) - first), units);
  if (source == panel) {
    for_images(window.source, first, units.count, [&](const PixelRun& run, int64_t row) {
      read_pixels(window.source, maps.source.given, run, panel + row * channels);
    });
    for (int64_t t = 0; t < round_up_rows(units.count); ++t) units.source[t] = panel + smaller(t, units.count - 1) * channels;
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
    const bool pair = kCols == 2 && b + 2 <= blocks;
    const auto run = pair ? window_columns<kCols> : window_columns<1>;
    run(units, met, count, window.source.channels, (first_block + b) * col_stride, col_stride,
        product + b * product_stride, product_stride);
    b += pair ? kCols : 1;
  }
  Block poison = zero();
  if (maps.target.own) finish_pixels(window, maps, units, first_block, blocks, product, poison);
  else
    finish_run(window, maps, units, first_block, blocks, product, panel + window.conv_rows * channels, poison);
  if (horizontal_sum(poison) != 0.0f) poisoned.store(true, std::memory_order_relaxed);
}

// bank[col][input] += input of row t * gradient[t][col], over the rows, for `Inputs` channels from each row's pointer on.
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
                                 const float* dy, float* banks, float* bias_gradients) {
  const auto [slice, group] = window.wgrad_item(item);
  const int64_t first_block = group * window.wgrad_group_blocks;
  const int64_t blocks = smaller(window.wgrad_group_blocks, window.output_blocks - first_block);
  const int64_t channels = window.source.padded_channels, col_stride = channels * kLanes;
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
      const int64_t offset = (tap.row * window.pitch + tap.column) * channels;
      float* plane = bank + tap.plane * window.plane_stride;
      for (int64_t b = 0; b < blocks;) {
        const bool pair = kCols == 2 && b + 2 <= blocks;
        const auto run = pair ? window_outer_tile<kPairRows, kCols> : window_outer_tile<kPairRows, 1>;
        for (int64_t i = 0; i < channels; i += kPairRows)
          run(units.source, offset + i, gradients, b * kLanes, units.count, plane + b * col_stride + i * kLanes,
              col_stride);
        b += pair ? kCols : 1;
      }
    }
  }
  for (int64_t b = 0; b < blocks; ++b) store(bias_gradient + b * kLanes, sum[b]);
}

// Entry e of a row of v: which input channel and tap it is.
class RowEntry {
 public:
  RowEntry(bool taps_first, int64_t channels, int64_t taps)
      : taps_first_(taps_first), end_(taps_first ? channels : taps) {}

  int64_t channel() const { return taps_first_ ? inner_ : outer_; }
  int64_t tap() const { return taps_first_ ? outer_ : inner_; }

  void advance() {
    if (++inner_ < end_) return;
    inner_ = 0;
    ++outer_;
  }

 private:
  bool taps_first_;
  int64_t end_, outer_ = 0, inner_ = 0;
};

WNFUSED_INLINE Block load_part(const float* source, int64_t lanes) {
  if (lanes >= kLanes) return load(source);
  float values[kLanes] = {};
  for (int64_t i = 0; i < lanes; ++i) values[i] = source[i];
  return load(values);
}

// One block of outputs, scaled.
inline void pack_window(const Window& window, const Parameter& v, int64_t outputs, int64_t output_block,
                        const Block (&scale)[kLanes], float* bank) {
  const int64_t channels = window.source.channels, floats = channels * window.planes;
  const int64_t row0 = output_block * kLanes, rows = smaller(kLanes, outputs - row0);
  const float* values = static_cast<const float*>(v.data) + row0 * floats;
  RowEntry entry(v.taps_first, channels, window.planes);
  for (int64_t e = 0; e < floats; e += kLanes) {
    Block block[kLanes];
    const int64_t lanes = smaller(kLanes, floats - e);
    for (int r = 0; r < kLanes; ++r)
      block[r] = r < rows ? load_part(values + r * floats + e, lanes) * scale[r] : zero();
    transpose(block);
    for (int64_t i = 0; i < lanes; ++i, entry.advance())
      store(bank + entry.tap() * window.plane_stride +
                (output_block * window.source.padded_channels + entry.channel()) * kLanes,
            block[i]);
  }
}

// g / ||v|| of a row whose norm is known.
template <class Job>
WNFUSED_INLINE float row_scale(const Job& job, int64_t row) {
  return job.norm[row] != 0.0f ? read(job.g, row) / job.norm[row] : 0.0f;
}

// One block of outputs, where the rows of v are the source's channels.
template <class Job>
void pack_transposed_window(const Job& job, const Window& window, int64_t input_block, float* bank) {
  const int64_t outputs = window.source.channels, inputs = window.target.channels, taps = window.planes;
  const int64_t input0 = input_block * kLanes, lanes = smaller(kLanes, inputs - input0), floats = inputs * taps;
  const bool runs = job.v.taps_first || taps == 1;
  float* depth0 = bank + input_block * window.source.padded_channels * kLanes;
  for (int64_t output = 0; output < outputs; ++output) {
    const float* row = static_cast<const float*>(job.v.data) + output * floats;
    const Block scale = splat(row_scale(job, output));
    float* target = depth0 + output * kLanes;
    if (runs) {
      for (int64_t k = 0; k < taps; ++k)
        store(target + k * window.plane_stride, load_part(row + k * inputs + input0, lanes) * scale);
      continue;
    }
    for (int64_t k0 = 0; k0 < taps; k0 += kLanes) {
      Block block[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t at = (input0 + i) * taps + k0;
        block[i] = i < lanes ? load_part(row + at, floats - at) : zero();
      }
      transpose(block);
      const int64_t end = smaller(kLanes, taps - k0);
      for (int64_t k = 0; k < end; ++k) store(target + (k0 + k) * window.plane_stride, block[k] * scale);
    }
  }
}

// dv, dg and dbias of one output block. window: the forward's. `scratch`: 18 rows of whole Blocks.
template <class Job>
void finish_window_gradient(const Job& job, const Window& window, int64_t output_block, const float* bank,
                            const float* bias_gradient, float* scratch) {
  const int64_t channels = window.source.channels, outputs = window.target.channels;
  const int64_t floats = channels * window.planes, padded = (floats + kLanes - 1) / kLanes * kLanes;
  fetch_row(job, output_block * kLanes, floats);
  RowEntry entry(job.v.taps_first, channels, window.planes);
  for (int64_t e = 0; e < floats; e += kLanes) {
    Block block[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      block[i] = zero();
      if (e + i >= floats) continue;
      const float* source = bank + entry.tap() * window.plane_stride +
                            (output_block * window.source.padded_channels + entry.channel()) * kLanes;
      for (int64_t s = 0; s < window.wgrad_slices; ++s) block[i] = block[i] + load(source + s * window.gradient_size());
      entry.advance();
    }
    transpose(block);
    WNFUSED_UNROLL for (int r = 0; r < kLanes; ++r) store(scratch + r * padded + e, block[r]);
  }
  finish_rows(job, outputs, {floats, padded}, 0, output_block, 1.0f, scratch, bias_gradient, window.wgrad_slices,
              scratch + kLanes * padded);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

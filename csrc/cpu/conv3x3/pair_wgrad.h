// The weight gradient of one convolution on bfloat16 operands (pairs.h): dW[tap] = x' d, the depth runs over pixels.
//
//   lines       inputs     [channel][lines + 2][W + 2]            a channel's pixels are a run; a tap shifts it
//               gradients  [output block][line][pixel / 2][16][2]
//   turned      gradients  [output][image][lines][W + 2]          for tiles, which sum over all lines of an image's chunk
//               inputs     [image][2][input block][pixel / 2][16][2]   as one run; border pixels have gradients of zero
//   positions   inputs     [pixel][channel][images]               a tap is another pixel
//               gradients  [output block][pixel][image / 2][16][2]
//
// A tile is slow to load from rows that do not begin a cache line. So `turned` has the gradients as rows, which no tap
// shifts, and the inputs as pairs, which a tap shifts by whole rows of 64 bytes: there are two copies, of pairs that begin
// at even pixels and at odd ones.
//
// A slice is a run of chunks, summed in order into its own bank, [tap][output block][input][16 outputs], turned
// [tap][input block][output][16 inputs], which is finished like any other's (pack.h).
#pragma once

#include "cpu/conv3x3/pair_conv.h"

namespace wnfused::cpu::WNFUSED_ISA {

constexpr int64_t kRun = 2 * kLanes;  // pixels that are transposed at once

// 16 channels of two pixels side by side, null for zeros.
WNFUSED_INLINE Block pairs_of(const uint16_t* even, const uint16_t* odd, int64_t lanes) {
  if (lanes == kLanes) return load_pairs(even, odd);
  uint16_t values[2][kLanes] = {};
  for (int64_t i = 0; i < lanes; ++i) {
    if (even) values[0][i] = even[i];
    if (odd) values[1][i] = odd[i];
  }
  return load_pairs(values[0], values[1]);
}

// 16 channels of up to 32 pixels, one channel's pixels side by side: run[c] are the 32 of channel c, as bits. Pixels
// beyond `count` are zero. Adds up the pixels in `sum`.
WNFUSED_INLINE void transpose_pixels(const Geometry& geometry, const uint16_t* map, int64_t pixel, int64_t pixel_step,
                                     int64_t count, int64_t channel_block, Block (&run)[kLanes], Block& sum) {
  const int64_t lanes = lanes_of_block(geometry, channel_block), step = pixel_step * geometry.channels;
  const uint16_t* source = map + pixel * geometry.channels + channel_block * kLanes;
  Block total = sum;
  if (lanes == kLanes && count >= kRun) {
    WNFUSED_UNROLL for (int64_t i = 0; i < kLanes; ++i, source += 2 * step) {
      run[i] = load_pairs(source, source + step);
      total = total + sum_of_pairs(run[i]);
    }
  } else {
    for (int64_t i = 0; i < kLanes; ++i, source += 2 * step) {
      run[i] = pairs_of(2 * i < count ? source : nullptr, 2 * i + 1 < count ? source + step : nullptr, lanes);
      total = total + sum_of_pairs(run[i]);
    }
  }
  sum = total;
  transpose(run);
}

WNFUSED_INLINE void transpose_pixels(const Geometry& geometry, const uint16_t* map, int64_t pixel, int64_t pixel_step,
                                     int64_t count, int64_t channel_block, Block (&run)[kLanes]) {
  Block unused = zero();
  transpose_pixels(geometry, map, pixel, pixel_step, count, channel_block, run, unused);
}

// The first `count` of a run.
WNFUSED_INLINE void store_run(uint16_t* target, const Block& run, int64_t count) {
  if (count == kRun) return store_bits(target, run);
  uint16_t values[kRun];
  store_bits(values, run);
  for (int64_t i = 0; i < count; ++i) target[i] = values[i];
}

// A run of pixels from pixel p on, cut into lines of `width`, which lie `line` apart: pieces that lie in one line each.
struct Cut {
  int64_t piece, at[kRun];

  Cut(int64_t p, int64_t count, int64_t width, int64_t line)
      : piece(width % kRun == 0 ? kRun : width % 8 == 0 ? 8 : 1) {
    int64_t y = p / width, x = p - y * width;
    for (int64_t i = 0; i * piece < count; ++i) {
      at[i] = y * line + x;
      if ((x += piece) == width) x = 0, ++y;
    }
  }

  // `run`: a channel's pixels.
  WNFUSED_INLINE void store(uint16_t* target, const Block& run, int64_t count) const {
    if (piece == kRun) return store_bits(target + at[0], run);
    uint16_t values[kRun];
    store_bits(values, run);
    if (piece == 8) {
      for (int64_t i = 0; i * 8 < count; ++i) __builtin_memcpy(target + at[i], values + 8 * i, 8 * sizeof(uint16_t));
    } else {
      for (int64_t i = 0; i < count; ++i) target[at[i]] = values[i];
    }
  }
};

// Lines [begin - 1, end + 1) that are in the map: their pixels follow one another there, and are cut into lines here.
inline void gather_input_lines(const Geometry& geometry, const uint16_t* map, int64_t image, int64_t begin, int64_t end,
                               uint16_t* panel) {
  const int64_t line = geometry.wgrad_line_pixels, plane = geometry.wgrad_plane, width = geometry.width;
  clear_elements(panel, geometry.padded_channels * plane);
  const int64_t top = begin > 0 ? begin - 1 : 0, bottom = smaller(end + 1, geometry.height);
  const int64_t pixels = (bottom - top) * width, first = (image * geometry.height + top) * width;
  panel += (top - begin + 1) * line + 1;
  for (int64_t b = 0; b < geometry.channel_blocks; ++b, panel += kLanes * plane)
    for (int64_t p = 0; p < pixels; p += kRun) {
      const int64_t count = smaller(kRun, pixels - p);
      Block run[kLanes];
      transpose_pixels(geometry, map, first + p, 1, count, b, run);
      const Cut cut(p, count, width, line);
      for (int64_t c = 0; c < kLanes; ++c) cut.store(panel + c * plane, run[c], count);
    }
}

inline void gather_input_positions(const Geometry& geometry, const uint16_t* map, int64_t begin, int64_t count,
                                   uint16_t* panel) {
  const int64_t pixels = geometry.height * geometry.width, rows = geometry.wgrad_rows;
  for (int64_t position = 0; position < pixels; ++position)
    for (int64_t b = 0; b < geometry.channel_blocks; ++b) {
      Block run[kLanes];
      transpose_pixels(geometry, map, begin * pixels + position, pixels, count, b, run);
      uint16_t* target = panel + (position * geometry.padded_channels + b * kLanes) * rows;
      for (int64_t c = 0; c < kLanes; ++c) store_run(target + c * rows, run[c], rows);
    }
}

// A run of `count` gradients, pairs side by side; an odd one is paired with zero.
WNFUSED_INLINE void interleave(const Geometry& geometry, const uint16_t* map, int64_t pixel, int64_t pixel_step,
                               int64_t count, int64_t channel_block, uint16_t* target, Block& sum) {
  for (int64_t i = 0; i < count; i += 2, target += 2 * kLanes) {
    const Block even = load_operand(geometry, map, pixel + i * pixel_step, channel_block);
    const Block odd = i + 1 < count ? load_operand(geometry, map, pixel + (i + 1) * pixel_step, channel_block) : zero();
    sum = sum + (even + odd);
    store_bits(target, exact_pairs(even, odd));
  }
}

// Gradients of lines [begin, end) of an image; `target` is one output block's run.
inline void gather_gradient_lines(const Geometry& geometry, const uint16_t* map, int64_t image, int64_t begin,
                                  int64_t end, int64_t channel_block, uint16_t* target, Block& sum) {
  for (int64_t y = begin; y < end; ++y)
    interleave(geometry, map, (image * geometry.height + y) * geometry.width, 1, geometry.width, channel_block,
               target + (y - begin) * geometry.wgrad_line_pixels * kLanes, sum);
}

inline void gather_gradient_positions(const Geometry& geometry, const uint16_t* map, int64_t begin, int64_t count,
                                      int64_t channel_block, uint16_t* target, Block& sum) {
  const int64_t pixels = geometry.height * geometry.width, rows = geometry.wgrad_rows;
  if (count < rows) clear_elements(target, pixels * rows * kLanes);
  for (int64_t position = 0; position < pixels; ++position)
    interleave(geometry, map, begin * pixels + position, pixels, count, channel_block, target + position * rows * kLanes,
               sum);
}

// One chunk of a slice: gathers, then nine products.
struct GradientChunk {
  int64_t first_block, blocks;  // of outputs
  uint16_t* inputs;
  uint16_t* gradients;
  Segment* segments;
  float* bank;
  bool accumulate;
};

WNFUSED_INLINE void multiply_taps(const Geometry& geometry, const GradientChunk& chunk, int64_t tap, int64_t segments) {
  int64_t offsets[kMaxGroups];
  const int64_t tile = geometry.pair_rows, groups = geometry.padded_channels / tile;
  const PairProduct product{chunk.segments, segments, geometry.wgrad_depth, geometry.wgrad_plane,
                            geometry.wgrad_run * kLanes, chunk.accumulate, false};
  PlainSink sink{chunk.bank + tap * geometry.gradient_stride, geometry.padded_channels * kLanes, tile};
  for (int64_t first = 0; first < groups; first += kMaxGroups) {
    const int64_t count = smaller(kMaxGroups, groups - first);
    for (int64_t g = 0; g < count; ++g) offsets[g] = (first + g) * tile * geometry.wgrad_plane;
    Pairs::multiply(product, offsets, count, chunk.blocks, sink);
    sink.out += count * tile * kLanes;
  }
}

inline void line_gradients(const Geometry& geometry, int64_t item, const uint16_t* x, const uint16_t* dy,
                           const GradientChunk& chunk, Block* bias_gradient) {
  const int64_t chunks = (geometry.height + geometry.wgrad_lines - 1) / geometry.wgrad_lines;
  const int64_t image = item / chunks, begin = item % chunks * geometry.wgrad_lines;
  const int64_t end = smaller(begin + geometry.wgrad_lines, geometry.height);
  gather_input_lines(geometry, x, image, begin, end, chunk.inputs);
  for (int64_t b = 0; b < chunk.blocks; ++b)
    gather_gradient_lines(geometry, dy, image, begin, end, chunk.first_block + b,
                          chunk.gradients + b * geometry.wgrad_run * kLanes, bias_gradient[b]);
  const int64_t segments = end - begin, line = geometry.wgrad_line_pixels;
  for (int64_t tap = 0; tap < kTaps; ++tap) {
    for (int64_t l = 0; l < segments; ++l)
      chunk.segments[l] = {chunk.inputs + (l + tap / 3) * line + tap % 3, chunk.gradients + l * line * kLanes};
    multiply_taps(geometry, chunk, tap, segments);
  }
}

// Lines [begin - 1, end + 1) of an image as pairs, those that begin at even pixels of a line and those at odd ones.
inline void gather_input_pairs(const Geometry& geometry, const uint16_t* map, int64_t image, int64_t begin, int64_t end,
                               uint16_t* panel) {
  constexpr int64_t kPair = 2 * kLanes;
  const int64_t width = geometry.width, pairs = geometry.wgrad_line_pixels / 2, all = geometry.wgrad_span / 2;
  const int64_t channels = geometry.channels;
  for (int64_t odd = 0; odd < 2; ++odd)
    for (int64_t b = 0; b < geometry.channel_blocks; ++b, panel += all * kPair) {
      const int64_t lanes = lanes_of_block(geometry, b);
      uint16_t* target = panel;
      for (int64_t y = begin - 1; y < end + 1; ++y, target += pairs * kPair) {
        if (y < 0 || y >= geometry.height) {
          clear_elements(target, pairs * kPair);
          continue;
        }
        // Element e of a line is pixel e - 1.
        const uint16_t* source = map + (image * geometry.height + y) * width * channels + b * kLanes;
        const auto pair = [&](int64_t i, bool even, bool odd_one) {
          const uint16_t* first = source + (2 * i + odd - 1) * channels;
          store_bits(target + i * kPair, pairs_of(even ? first : nullptr, odd_one ? first + channels : nullptr, lanes));
        };
        const int64_t inside = (width - odd + 1) / 2;  // pairs up to here end inside the line
        if (odd == 0) pair(0, false, true);
        for (int64_t i = 1 - odd; i < inside; ++i) pair(i, true, true);
        for (int64_t i = inside; i < pairs; ++i) pair(i, 2 * i + odd - 1 < width, false);
      }
      clear_elements(target, all * kPair - (target - panel));
    }
}

// Gradients of lines [begin, end) of an image, each output's as a run; `target` is the first one's.
inline void gather_gradient_rows(const Geometry& geometry, const uint16_t* map, int64_t image, int64_t begin,
                                 int64_t end, int64_t channel_block, uint16_t* target, Block& bias_gradient) {
  const int64_t width = geometry.width, line = geometry.wgrad_line_pixels, plane = geometry.wgrad_plane;
  Block sum = bias_gradient;  // in registers
  const int64_t first = (image * geometry.height + begin) * width, pixels = (end - begin) * width;
  // Zeros between lines, two or three, and behind the last one: up to a run further than the depth, where the next image's
  // gradients are written later.
  for (int64_t c = 0; c < kLanes; ++c) {
    uint16_t* row = target + c * plane;
    for (int64_t y = 1; y <= end - begin; ++y) {
      row[y * line - 2] = row[y * line - 1] = 0;
      if (line - width == 3) row[y * line - 3] = 0;
    }
    for (int64_t i = (end - begin) * line; i < geometry.wgrad_depth; i += kRun) store_bits(row + i, zero());
  }
  for (int64_t p = 0; p < pixels; p += kRun) {
    const int64_t count = smaller(kRun, pixels - p);
    Block run[kLanes];
    transpose_pixels(geometry, map, first + p, 1, count, channel_block, run, sum);
    const Cut cut(p, count, width, line);
    for (int64_t c = 0; c < kLanes; ++c) cut.store(target + c * plane, run[c], count);
  }
  bias_gradient = sum;
}

inline void turned_gradients(const Geometry& geometry, int64_t item, const uint16_t* x, const uint16_t* dy,
                             const GradientChunk& chunk, Block* bias_gradient) {
  const int64_t chunks = (geometry.height + geometry.wgrad_lines - 1) / geometry.wgrad_lines;
  const int64_t image = item / chunks * geometry.wgrad_images, begin = item % chunks * geometry.wgrad_lines;
  const int64_t end = smaller(begin + geometry.wgrad_lines, geometry.height);
  const int64_t images = smaller(geometry.wgrad_images, geometry.images - image);
  const int64_t block = geometry.wgrad_span * kLanes, parity = geometry.channel_blocks * block;
  for (int64_t i = 0; i < images; ++i) {
    gather_input_pairs(geometry, x, image + i, begin, end, chunk.inputs + 2 * i * parity);
    for (int64_t b = 0; b < chunk.blocks; ++b)
      gather_gradient_rows(geometry, dy, image + i, begin, end, chunk.first_block + b,
                           chunk.gradients + b * kLanes * geometry.wgrad_plane + i * geometry.wgrad_depth,
                           bias_gradient[b]);
  }
  int64_t offsets[kMaxGroupBlocks];
  for (int64_t b = 0; b < chunk.blocks; ++b) offsets[b] = b * kLanes * geometry.wgrad_plane;
  // Where there is one block of inputs, the columns of a product are the taps of a filter's column.
  const int64_t line_pairs = geometry.wgrad_line_pixels / 2 * 2 * kLanes, lines = geometry.channel_blocks > 1 ? 3 : 1;
  const int64_t next = lines == 1 ? line_pairs : block, cols = lines == 1 ? 3 : geometry.channel_blocks;
  const int64_t next_sums = lines == 1 ? 3 * geometry.gradient_stride : geometry.block_floats();
  for (int64_t x = 0; x < 3; ++x)
    for (int64_t y = 0; y < lines; ++y) {
      for (int64_t i = 0; i < images; ++i)
        chunk.segments[i] = {chunk.gradients + i * geometry.wgrad_depth,
                             chunk.inputs + (2 * i + x % 2) * parity + y * line_pairs + x / 2 * 2 * kLanes};
      PlainSink sink{chunk.bank + (3 * y + x) * geometry.gradient_stride, next_sums, geometry.pair_rows};
      Pairs::multiply({chunk.segments, images, geometry.wgrad_depth, geometry.wgrad_plane, next, chunk.accumulate, false},
                      offsets, chunk.blocks, cols, sink);
    }
}

inline void position_gradients(const Geometry& geometry, int64_t item, const uint16_t* x, const uint16_t* dy,
                               const GradientChunk& chunk, Block* bias_gradient) {
  const int64_t rows = geometry.wgrad_rows, begin = item * rows, count = smaller(rows, geometry.images - begin);
  gather_input_positions(geometry, x, begin, count, chunk.inputs);
  for (int64_t b = 0; b < chunk.blocks; ++b)
    gather_gradient_positions(geometry, dy, begin, count, chunk.first_block + b,
                              chunk.gradients + b * geometry.wgrad_run * kLanes, bias_gradient[b]);
  for (int64_t tap = 0; tap < kTaps; ++tap) {
    const int64_t dy_tap = tap / 3 - 1, dx_tap = tap % 3 - 1;
    int64_t segments = 0;
    for (int64_t y = 0; y < geometry.height; ++y)
      for (int64_t u = 0; u < geometry.width; ++u) {
        if (y + dy_tap < 0 || y + dy_tap >= geometry.height || u + dx_tap < 0 || u + dx_tap >= geometry.width) continue;
        const int64_t position = y * geometry.width + u, input = position + tap_shift(geometry, tap);
        chunk.segments[segments++] = {chunk.inputs + input * geometry.padded_channels * rows,
                                      chunk.gradients + position * rows * kLanes};
      }
    multiply_taps(geometry, chunk, tap, segments);
  }
}

// Item `item` of a weight gradient: one slice, one group of output blocks.
inline void weight_gradient_item(const Geometry& geometry, int64_t item, const uint16_t* x, const uint16_t* dy,
                                 float* banks, float* bias_gradients, float* scratch) {
  const auto [slice, group] = geometry.wgrad_item(item);
  const int64_t first_block = group * geometry.wgrad_group_blocks;
  const int64_t blocks = smaller(geometry.wgrad_group_blocks, geometry.channel_blocks - first_block);
  const int64_t block_stride = geometry.padded_channels * kLanes;
  const int64_t begin = slice * geometry.wgrad_slice_chunks;
  const int64_t end = smaller(begin + geometry.wgrad_slice_chunks, geometry.wgrad_chunks);
  GradientChunk chunk{};
  chunk.first_block = first_block;
  chunk.blocks = blocks;
  chunk.segments = reinterpret_cast<Segment*>(scratch);
  scratch += (geometry.wgrad_segments() * sizeof(Segment) / sizeof(float) + kLanes - 1) / kLanes * kLanes;
  chunk.inputs = reinterpret_cast<uint16_t*>(scratch);
  chunk.gradients = reinterpret_cast<uint16_t*>(scratch + panel_floats(geometry.wgrad_inputs()));
  const bool turned = geometry.wgrad_turned;
  chunk.bank = banks + slice * geometry.gradient_size() + first_block * (turned ? kLanes * kLanes : block_stride);
  // Of an empty batch: the item's blocks are one run, turned one of each input block.
  const int64_t runs = turned ? geometry.channel_blocks : 1, run = blocks * (turned ? kLanes * kLanes : block_stride);
  for (int64_t tap = 0; begin >= end && tap < kTaps; ++tap)
    for (int64_t i = 0; i < runs; ++i)
      __builtin_memset(chunk.bank + tap * geometry.gradient_stride + i * block_stride, 0, run * sizeof(float));
  Block bias_gradient[kMaxGroupBlocks];
  for (Block& sum : bias_gradient) sum = zero();
  for (int64_t part = begin; part < end; ++part) {
    chunk.accumulate = part > begin;
    if (turned) turned_gradients(geometry, part, x, dy, chunk, bias_gradient);
    else if (geometry.wgrad_positions) position_gradients(geometry, part, x, dy, chunk, bias_gradient);
    else line_gradients(geometry, part, x, dy, chunk, bias_gradient);
  }
  for (int64_t b = 0; b < blocks; ++b)
    store(bias_gradients + slice * geometry.padded_channels + (first_block + b) * kLanes, bias_gradient[b]);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

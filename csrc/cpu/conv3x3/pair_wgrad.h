// The weight gradient of one convolution on bfloat16 operands (pairs.h): dW[tap] = x' d, the depth runs over pixels.
//
//   lines       inputs     [channel][lines + 2][W + 2]            a channel's pixels are a run; a tap shifts it
//               gradients  [output block][line][pixel / 2][16][2]
//   turned      gradients  [output][lines][W + 2]                 for tiles, which sum over all lines of a chunk as one
//               inputs     [pixel / 2][16][2]                     run; border pixels have gradients of zero
//   by images   gradients  [output][image / 2][lines][W + 2][2]   turned, of two images at a time
//               inputs     [image / 2][pixel][16][2]
//   positions   inputs     [pixel][channel][images]               a tap is another pixel
//               gradients  [output block][pixel][image / 2][16][2]
//
// A tile is slow to load from rows that do not begin a cache line. So `turned` has the gradients as rows, which no tap
// shifts, and the inputs as pairs, which a tap shifts by whole rows of 64 bytes. Pairs of pixels take two copies of a block
// in turn, of those that begin at even pixels and at odd ones; a pixel of two images one.
//
// A slice is a run of chunks, summed in order into its own bank, [tap][output block][input][16 outputs], turned
// [tap][input block][output][16 inputs], which is finished like any other's (finish_gradient.h).
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

// Up to 16 pairs of pixels of one block of 16 channels, each channel's side by side: run[c] are the 32 of channel c, as
// bits. Pair i is the pixels `i` steps on from `even` and `odd`; there are `evens` and `odds` of them, and zeros beyond.
// Adds up the pixels in `sum`.
struct PixelPairs {
  const uint16_t *even, *odd;
  int64_t step, evens, odds;  // elements; pairs
};

WNFUSED_INLINE void transpose_pairs(const PixelPairs& pairs, int64_t lanes, Block (&run)[kLanes], Block& sum) {
  const uint16_t *even = pairs.even, *odd = pairs.odd;
  if (lanes == kLanes && pairs.evens >= kLanes && pairs.odds >= kLanes) {
    WNFUSED_UNROLL for (int64_t i = 0; i < kLanes; ++i, even += pairs.step, odd += pairs.step)
      run[i] = load_pairs(even, odd);
  } else {
    for (int64_t i = 0; i < kLanes; ++i, even += pairs.step, odd += pairs.step)
      run[i] = pairs_of(i < pairs.evens ? even : nullptr, i < pairs.odds ? odd : nullptr, lanes);
  }
  Block sums[4] = {zero(), zero(), zero(), zero()};  // a single one would be a chain of sixteen additions
  WNFUSED_UNROLL for (int i = 0; i < kLanes; ++i) sums[i % 4] = add_pairs(sums[i % 4], run[i]);
  sum = sum + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
  transpose(run);
}

// `count` pixels of a map, `pixel_step` apart, as pairs of neighbours.
WNFUSED_INLINE void transpose_pixels(const Geometry& geometry, const uint16_t* map, int64_t pixel, int64_t pixel_step,
                                     int64_t count, int64_t channel_block, Block (&run)[kLanes]) {
  const int64_t step = pixel_step * geometry.channels;
  const uint16_t* first = map + pixel * geometry.channels + channel_block * kLanes;
  Block unused = zero();
  transpose_pairs({first, first + step, 2 * step, (count + 1) / 2, count / 2}, lanes_of_block(geometry, channel_block), run,
                  unused);
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
      : piece(width % kRun == 0 ? kRun : width % kLanes == 0 ? kLanes : width % 8 == 0 ? 8 : 1) {
    int64_t y = p / width, x = p - y * width;
    for (int64_t i = 0; i * piece < count; ++i) {
      at[i] = y * line + x;
      if ((x += piece) == width) x = 0, ++y;
    }
  }

  // run[c]: the pixels of channel c, whose lines lie `plane` after those of the channel before.
  WNFUSED_INLINE void store(uint16_t* target, int64_t plane, const Block (&run)[kLanes], int64_t count) const {
    if (piece == kRun) {
      target += at[0];
      WNFUSED_UNROLL for (int c = 0; c < kLanes; ++c) store_bits(target + c * plane, run[c]);
      return;
    }
    uint16_t values[kLanes][kRun];
    WNFUSED_UNROLL for (int c = 0; c < kLanes; ++c) store_bits(values[c], run[c]);
    for (int c = 0; c < kLanes; ++c, target += plane) {
      if (piece == kLanes) store_pieces<kLanes>(target, values[c], count);
      else if (piece == 8) store_pieces<8>(target, values[c], count);
      else store_pieces<1>(target, values[c], count);
    }
  }

 private:
  template <int kPiece>
  WNFUSED_INLINE void store_pieces(uint16_t* target, const uint16_t* values, int64_t count) const {
    for (int64_t i = 0; i * kPiece < count; ++i)
      __builtin_memcpy(target + at[i], values + kPiece * i, kPiece * sizeof(uint16_t));
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
      cut.store(panel, plane, run, count);
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

// One line of one block of channels as pairs of pixels. Element e of it is pixel e - 1, and the pairs begin at its element
// `odd`. kFull: the block has 16 channels.
template <bool kFull>
WNFUSED_INLINE void gather_pixel_pairs(const uint16_t* line, int64_t width, int64_t channels, int64_t lanes, int64_t odd,
                                       int64_t pairs, uint16_t* target) {
  constexpr int64_t kPair = 2 * kLanes;
  const auto pair_of = [&](const uint16_t* even, const uint16_t* next) {
    return kFull ? load_pairs(even, next) : pairs_of(even, next, lanes);
  };
  const int64_t inside = (width - odd + 1) / 2;  // pairs up to here end inside the line
  const uint16_t* source = line + (odd == 0 ? channels : 0);
  if (odd == 0) store_bits(target, pair_of(nullptr, line));
  for (int64_t i = 1 - odd; i < inside; ++i, source += 2 * channels)
    store_bits(target + i * kPair, pair_of(source, source + channels));
  for (int64_t i = inside; i < pairs; ++i, source += 2 * channels)
    store_bits(target + i * kPair, 2 * i + odd - 1 < width ? pair_of(source, nullptr) : zero());
}

// The same line of two images, pixel by pixel; `other` may be null.
template <bool kFull>
WNFUSED_INLINE void gather_image_pairs(const uint16_t* line, const uint16_t* other, int64_t width, int64_t channels,
                                       int64_t lanes, uint16_t* target) {
  constexpr int64_t kPair = 2 * kLanes;
  store_bits(target, zero());
  target += kPair;
  for (int64_t x = 0; x < width; ++x, line += channels, target += kPair) {
    const uint16_t* second = other ? other + x * channels : nullptr;
    store_bits(target, kFull ? load_pairs(line, second) : pairs_of(line, second, lanes));
  }
  store_bits(target, zero());
}

// The lines of a chunk, `images` of one image or two.
struct GradientLines {
  int64_t image, images, begin, end;
};

// Inputs of the lines, those above and below, of one block of channels; by pixels, of the pairs that begin at element `odd`.
inline void gather_input_pairs(const Geometry& geometry, const uint16_t* map, const GradientLines& lines,
                               int64_t channel_block, int64_t odd, uint16_t* panel) {
  constexpr int64_t kPair = 2 * kLanes;
  const int64_t width = geometry.width, pairs = geometry.wgrad_line_pixels / 2, channels = geometry.channels;
  const int64_t lanes = lanes_of_block(geometry, channel_block), plane = geometry.height * width * channels;
  uint16_t* target = panel;
  for (int64_t y = lines.begin - 1; y < lines.end + 1; ++y, target += pairs * kPair) {
    if (y < 0 || y >= geometry.height) {
      clear_elements(target, pairs * kPair);
      continue;
    }
    const uint16_t* line = map + lines.image * plane + y * width * channels + channel_block * kLanes;
    const uint16_t* other = lines.images > 1 ? line + plane : nullptr;
    if (geometry.wgrad_by_images) {
      if (lanes == kLanes) gather_image_pairs<true>(line, other, width, channels, lanes, target);
      else gather_image_pairs<false>(line, other, width, channels, lanes, target);
    } else {
      if (lanes == kLanes) gather_pixel_pairs<true>(line, width, channels, lanes, odd, pairs, target);
      else gather_pixel_pairs<false>(line, width, channels, lanes, odd, pairs, target);
    }
  }
  clear_elements(target, geometry.wgrad_span / 2 * kPair - (target - panel));
}

// Gradients of the lines, each output's as a run; `target` is the first one's.
inline void gather_gradient_rows(const Geometry& geometry, const uint16_t* map, const GradientLines& lines,
                                 int64_t channel_block, uint16_t* target, Block& bias_gradient) {
  const bool by_images = geometry.wgrad_by_images;
  const int64_t line = geometry.wgrad_line_pixels, plane = geometry.wgrad_plane, channels = geometry.channels;
  const int64_t image = geometry.height * geometry.width, width = by_images ? 2 * geometry.width : geometry.width;
  const int64_t count = lines.end - lines.begin, lanes = lanes_of_block(geometry, channel_block);
  Block sum = bias_gradient;  // in registers
  // Zeros between lines and behind the last one: up to a run further than the depth, where the next images' gradients are
  // written later.
  for (int64_t c = 0; c < kLanes; ++c) {
    uint16_t* row = target + c * plane;
    for (uint16_t *gap = row + width, *end = row + count * line; gap < end; gap += line) {
      __builtin_memset(gap, 0, 2 * sizeof(uint16_t));
      if (line - width > 2) __builtin_memset(gap + line - width - 2, 0, 2 * sizeof(uint16_t));
    }
    for (int64_t i = count * line; i < geometry.wgrad_depth; i += kRun) store_bits(row + i, zero());
  }
  const uint16_t* source = map + (lines.image * image + lines.begin * geometry.width) * channels + channel_block * kLanes;
  for (int64_t p = 0; p < count * width; p += kRun) {
    const int64_t left = smaller(kRun, count * width - p), even = (left + 1) / 2, odd = left / 2;
    Block run[kLanes];
    if (by_images) {
      const uint16_t* first = source + p / 2 * channels;
      transpose_pairs({first, first + image * channels, channels, even, lines.images > 1 ? odd : 0}, lanes, run, sum);
    } else {
      const uint16_t* first = source + p * channels;
      transpose_pairs({first, first + channels, 2 * channels, even, odd}, lanes, run, sum);
    }
    const Cut cut(p, left, width, line);
    cut.store(target, plane, run, left);
  }
  bias_gradient = sum;
}

inline void turned_gradients(const Geometry& geometry, int64_t item, const uint16_t* x, const uint16_t* dy,
                             const GradientChunk& chunk, Block* bias_gradient) {
  const int64_t chunks = (geometry.height + geometry.wgrad_lines - 1) / geometry.wgrad_lines;
  const int64_t image = item / chunks * geometry.wgrad_images, begin = item % chunks * geometry.wgrad_lines;
  const int64_t end = smaller(begin + geometry.wgrad_lines, geometry.height);
  const int64_t images = smaller(geometry.wgrad_images, geometry.images - image);
  const int64_t together = geometry.wgrad_by_images ? 2 : 1, segments = (images + together - 1) / together;
  const auto lines = [&](int64_t segment) {
    const int64_t first = segment * together;
    return GradientLines{image + first, smaller(together, images - first), begin, end};
  };
  for (int64_t i = 0; i < segments; ++i)
    for (int64_t b = 0; b < chunk.blocks; ++b)
      gather_gradient_rows(geometry, dy, lines(i), chunk.first_block + b,
                           chunk.gradients + b * kLanes * geometry.wgrad_plane + i * geometry.wgrad_depth,
                           bias_gradient[b]);
  int64_t offsets[kMaxGroupBlocks];
  for (int64_t b = 0; b < chunk.blocks; ++b) offsets[b] = b * kLanes * geometry.wgrad_plane;
  // One copy of one block of inputs at a time stays, with the gradients, in the first-level cache. The columns of a product
  // are the three taps of a filter's column.
  const int64_t panel = geometry.wgrad_span * kLanes, line_pairs = geometry.wgrad_line_pixels * kLanes;
  const int64_t copies = geometry.wgrad_by_images ? 1 : 2;
  for (int64_t input_block = 0; input_block < geometry.channel_blocks; ++input_block)
    for (int64_t copy = 0; copy < copies; ++copy) {
      for (int64_t i = 0; i < segments; ++i)
        gather_input_pairs(geometry, x, lines(i), input_block, copy, chunk.inputs + i * panel);
      for (int64_t column = copy; column < 3; column += copies) {
        for (int64_t i = 0; i < segments; ++i)
          chunk.segments[i] = {chunk.gradients + i * geometry.wgrad_depth,
                               chunk.inputs + i * panel + column / copies * 2 * kLanes};
        PlainSink sink{chunk.bank + column * geometry.gradient_stride + input_block * geometry.padded_channels * kLanes,
                       3 * geometry.gradient_stride, geometry.pair_rows};
        Pairs::multiply({chunk.segments, segments, geometry.wgrad_depth, geometry.wgrad_plane, line_pairs,
                         chunk.accumulate, false},
                        offsets, chunk.blocks, 3, sink);
      }
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

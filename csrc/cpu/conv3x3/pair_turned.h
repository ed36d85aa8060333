// The weight gradient for tiles: gradients as rows, inputs as pairs that a tap shifts, by pixels or by images
// (pair_wgrad.h).
#pragma once

#include "cpu/conv3x3/gradient_chunk.h"
#include "cpu/conv3x3/pair_runs.h"

namespace wnfused::cpu::WNFUSED_ISA {

// One line of one block of channels as pairs of pixels. Element e of it is pixel e - 1, and the pairs begin at its
// element `begin`, 0 or 1. kFull: the block has 16 channels.
template <bool kFull>
WNFUSED_INLINE void gather_pixel_pairs(const uint16_t* line, int64_t width, int64_t channels, int64_t lanes,
                                       int64_t begin, int64_t pairs, uint16_t* target) {
  const auto pair_of = [&](const uint16_t* even, const uint16_t* next) {
    return kFull ? load_pairs(even, next) : pairs_of(even, next, lanes);
  };
  const int64_t inside = (width - begin + 1) / 2;  // pairs up to here end inside the line
  const uint16_t* source = line + (begin == 0 ? channels : 0);
  if (begin == 0) store_bits(target, pair_of(nullptr, line));
  for (int64_t i = 1 - begin; i < inside; ++i, source += 2 * channels)
    store_bits(target + i * kRun, pair_of(source, source + channels));
  for (int64_t i = inside; i < pairs; ++i, source += 2 * channels)
    store_bits(target + i * kRun, 2 * i + begin - 1 < width ? pair_of(source, nullptr) : zero());
}

// The same line of two images, pixel by pixel; `other` may be null.
template <bool kFull>
WNFUSED_INLINE void gather_image_pairs(const uint16_t* line, const uint16_t* other, int64_t width, int64_t channels,
                                       int64_t lanes, uint16_t* target) {
  store_bits(target, zero());
  target += kRun;
  for (int64_t x = 0; x < width; ++x, line += channels, target += kRun) {
    const uint16_t* second = other ? other + x * channels : nullptr;
    store_bits(target, kFull ? load_pairs(line, second) : pairs_of(line, second, lanes));
  }
  store_bits(target, zero());
}

// The lines of a chunk, `images` of one image or two.
struct GradientLines {
  int64_t image, images, begin, end;
};

// Inputs of the lines, those above and below, of one block of channels; by pixels, of the pairs that begin at element
// `begin`.
inline void gather_input_pairs(const Geometry& geometry, const uint16_t* map, const GradientLines& lines,
                               int64_t channel_block, int64_t begin, uint16_t* panel) {
  const int64_t width = geometry.width, pairs = geometry.wgrad_line_pixels / 2, channels = geometry.channels;
  const int64_t lanes = lanes_of_block(geometry, channel_block), plane = geometry.height * width * channels;
  uint16_t* target = panel;
  for (int64_t y = lines.begin - 1; y < lines.end + 1; ++y, target += pairs * kRun) {
    if (y < 0 || y >= geometry.height) {
      clear_elements(target, pairs * kRun);
      continue;
    }
    const uint16_t* line = map + lines.image * plane + y * width * channels + channel_block * kLanes;
    const uint16_t* other = lines.images > 1 ? line + plane : nullptr;
    if (geometry.wgrad_by_images) {
      if (lanes == kLanes) gather_image_pairs<true>(line, other, width, channels, lanes, target);
      else gather_image_pairs<false>(line, other, width, channels, lanes, target);
    } else {
      if (lanes == kLanes) gather_pixel_pairs<true>(line, width, channels, lanes, begin, pairs, target);
      else gather_pixel_pairs<false>(line, width, channels, lanes, begin, pairs, target);
    }
  }
  clear_elements(target, geometry.wgrad_span * kLanes - (target - panel));
}

// Gradients of the lines, each output's as a run; `target` is the first one's.
inline void gather_gradient_rows(const Geometry& geometry, const uint16_t* map, const GradientLines& lines,
                                 int64_t channel_block, uint16_t* target, Block& bias_gradient) {
  const bool by_images = geometry.wgrad_by_images;
  const int64_t line = geometry.wgrad_line_pixels, plane = geometry.wgrad_plane, channels = geometry.channels;
  const int64_t image = geometry.height * geometry.width, width = by_images ? 2 * geometry.width : geometry.width;
  const int64_t count = lines.end - lines.begin, lanes = lanes_of_block(geometry, channel_block);
  Block sum = bias_gradient;  // in registers
  // Zeros between lines and behind the last one: up to a run further than the depth, where the next images' gradients
  // are written later.
  for (int64_t c = 0; c < kLanes; ++c) {
    uint16_t* row = target + c * plane;
    for (uint16_t *gap = row + width, *end = row + count * line; gap < end; gap += line) {
      __builtin_memset(gap, 0, 2 * sizeof(uint16_t));
      if (line - width > 2) __builtin_memset(gap + line - width - 2, 0, 2 * sizeof(uint16_t));
    }
    for (int64_t i = count * line; i < geometry.wgrad_depth; i += kRun) store_bits(row + i, zero());
  }
  const uint16_t* source =
      map + (lines.image * image + lines.begin * geometry.width) * channels + channel_block * kLanes;
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
    const LinePieces pieces(p, left, width, line);
    pieces.store(target, plane, run, left);
  }
  bias_gradient = sum;
}

inline void turned_gradients(const Geometry& geometry, int64_t item, const uint16_t* x, const uint16_t* dy,
                             const GradientChunk& chunk, Block* bias_gradient) {
  const int64_t chunks = divide_up(geometry.height, geometry.wgrad_lines);
  const int64_t image = item / chunks * geometry.wgrad_images, begin = item % chunks * geometry.wgrad_lines;
  const int64_t end = smaller(begin + geometry.wgrad_lines, geometry.height);
  const int64_t images = smaller(geometry.wgrad_images, geometry.images - image);
  const int64_t together = geometry.wgrad_by_images ? 2 : 1, segments = divide_up(images, together);
  const auto lines = [&](int64_t segment) {
    const int64_t first = segment * together;
    return GradientLines{image + first, smaller(together, images - first), begin, end};
  };
  for (int64_t i = 0; i < segments; ++i)
    for (int64_t b = 0; b < chunk.blocks; ++b)
      gather_gradient_rows(geometry, dy, lines(i), chunk.first_block + b,
                           chunk.gradients + b * kLanes * geometry.wgrad_plane + i * geometry.wgrad_depth,
                           bias_gradient[b]);
  int64_t offsets[kMaxBundleBlocks];
  for (int64_t b = 0; b < chunk.blocks; ++b) offsets[b] = b * kLanes * geometry.wgrad_plane;
  // One copy of one block of inputs at a time stays, with the gradients, in the first-level cache. The columns of a
  // product are the three taps of a filter's column.
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
                         chunk.accumulate},
                        offsets, chunk.blocks, 3, sink);
      }
    }
}

}  // namespace wnfused::cpu::WNFUSED_ISA

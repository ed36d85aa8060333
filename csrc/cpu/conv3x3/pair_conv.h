// One convolution of the stage on bfloat16 operands, over a chunk of pixels (pairs.h).
//
//   lines       a chunk is some lines of one image, with the lines above and below and a border of zeros
//
//               panel [line][W + 2][Cp]     product row of pixel x: the run of 3 Cp elements from panel pixel x on, in
//                                           three lines
//               With tiles, 16 channels and an even width a row is two pixels, whose four neighbours are one run, so
//               that every row begins a cache line: a tile is slow to load from others. The outputs of the second pixel
//               are a block of their own, with the filters one pixel further down the depth.
//
//   positions   a chunk is all pixels of a group of images
//
//               panel [pixel][image][Cp]    product row of an image: its Cp elements at each tap that is inside the map
//
// The panel is a copy, 2 bytes an element: what lies outside the map or the batch is zero there, and its rows lie apart
// by the same stride. Where nothing is saved and rows are tiles, maps have borders themselves, and lines of them are
// panels without a copy, in memory that each convolution writes and the next one reads (clear_borders). Product rows
// that are no pixel (ends of lines, and what is read behind the last one) are computed and left out by the epilogue.
#pragma once

#include "cpu/conv/pair_panels.h"
#include "cpu/conv3x3/pair_finish.h"
#include "cpu/vec/prefetch.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Lines [begin - 1, end + 1) of an image with a pixel of zeros on either side; and zeros where the depth of the last
// row ends behind the panel, since not even weights of zero make nothing of an infinity.
inline void gather_lines(const Geometry& geometry, const uint16_t* map, int64_t image, int64_t begin, int64_t end,
                         uint16_t* panel) {
  const int64_t padded = geometry.padded_channels, line = geometry.conv_line_pixels * padded;
  for (int64_t y = begin - 1; y < end + 1; ++y, panel += line) {
    Pairs::keep_awake();
    if (y < 0 || y >= geometry.height) {
      clear_elements(panel, line);
      continue;
    }
    const int64_t pixel = (image * geometry.height + y) * geometry.width;
    clear_elements(panel, padded);
    copy_padded(map + pixel * geometry.channels, geometry.channels, geometry.width, geometry.channels, padded,
                panel + padded);
    clear_elements(panel + (geometry.width + 1) * padded, line - (geometry.width + 1) * padded);
  }
  clear_elements(panel, geometry.segment_depth - (geometry.row_pixels + 2) * padded);
}

// The border of an image of a map that has one, and what tiles read behind the last image.
inline void clear_borders(const Geometry& geometry, uint16_t* map, int64_t image) {
  const int64_t channels = geometry.channels, line = geometry.operand_line();
  uint16_t* at = map + image * geometry.operand_image() * channels;
  clear_elements(at, line * channels);
  at += line * channels;
  for (int64_t y = 0; y < geometry.height; ++y, at += line * channels) {
    clear_elements(at, channels);
    clear_elements(at + (geometry.width + 1) * channels, (line - geometry.width - 1) * channels);
  }
  clear_elements(at, line * channels + (image + 1 == geometry.images ? geometry.operand_slack() : 0));
}

// Images [begin, begin + count), all their pixels, as groups of `rows` images.
inline void gather_positions(const Geometry& geometry, const uint16_t* map, int64_t begin, int64_t count, int64_t rows,
                             uint16_t* panel) {
  const int64_t padded = geometry.padded_channels, pixels = geometry.height * geometry.width;
  map += begin * pixels * geometry.channels;
  for (int64_t pixel = 0; pixel < pixels; ++pixel, panel += rows * padded) {
    copy_padded(map + pixel * geometry.channels, pixels * geometry.channels, count, geometry.channels, padded, panel);
    clear_elements(panel + count * padded, (rows - count) * padded);
  }
  clear_elements(panel, geometry.segment_depth - padded);
}

// The segments of one position: taps inside the map. Returns their number.
inline int64_t taps_inside(const Geometry& geometry, int64_t y, int64_t x, int64_t (&taps)[kTaps]) {
  int64_t count = 0;
  for (int64_t tap = 0; tap < kTaps; ++tap) {
    const int64_t v = y + tap / 3 - 1, u = x + tap % 3 - 1;
    if (v >= 0 && v < geometry.height && u >= 0 && u < geometry.width) taps[count++] = tap;
  }
  return count;
}

WNFUSED_INLINE int64_t tap_shift(const Geometry& geometry, int64_t tap) {
  return (tap / 3 - 1) * geometry.width + tap % 3 - 1;
}

struct ConvolutionChunk {
  int64_t blocks;        // of outputs
  const uint16_t* bank;  // of the first one
  uint16_t* panel;
};

template <class Sink>
inline void convolve_lines(const Geometry& geometry, const uint16_t* map, int64_t item, const ConvolutionChunk& chunk,
                           Sink& sink) {
  const int64_t chunks = divide_up(geometry.height, geometry.conv_lines);
  const int64_t image = item / chunks, begin = item % chunks * geometry.conv_lines;
  const int64_t end = smaller(begin + geometry.conv_lines, geometry.height);
  const int64_t padded = geometry.padded_channels, tile = geometry.pair_rows, line = geometry.conv_line_pixels;
  const int64_t pixels = geometry.row_pixels;
  const uint16_t* lines = chunk.panel;
  if (geometry.bordered) lines = map + (image * geometry.operand_image() + begin * line) * padded;
  else gather_lines(geometry, map, image, begin, end, chunk.panel);

  Segment segments[3];
  for (int64_t i = 0; i < 3; ++i) segments[i] = {lines + i * line * padded, chunk.bank + geometry.filters_offset(i, 0)};
  PairProduct product{segments, 3, geometry.segment_depth, pixels * padded, geometry.filters_stride()};
  product.neighbours = true;
  // Lines that are one run of rows have borders in between; otherwise each line begins a tile.
  const bool run = geometry.conv_line_rows * pixels == line;
  const int64_t width = geometry.width / pixels, inside = (end - begin) * width;
  const int64_t rows = run ? (end - begin - 1) * geometry.conv_line_rows + width : geometry.conv_line_rows;
  const RowPixels where{(image * geometry.height + begin) * geometry.width,
                        pixels,
                        geometry.conv_line_rows,
                        width,
                        inside,
                        image * geometry.operand_image() + geometry.operand_origin() + begin * geometry.operand_line(),
                        geometry.operand_line()};
  int64_t offsets[kMaxGroups], groups = 0, first_row = 0;
  const auto multiply = [&] {
    sink.begin(where, first_row, groups);
    Pairs::multiply(product, offsets, groups, chunk.blocks * pixels, sink);
    first_row += groups * tile;
    groups = 0;
  };
  for (int64_t l = 0; l < (run ? 1 : end - begin); ++l)
    for (int64_t row = 0; row < rows; row += tile) {
      offsets[groups++] = (l * line + row * pixels) * padded;
      if (groups == kMaxGroups) multiply();
    }
  if (groups > 0) multiply();
}

template <class Sink>
inline void convolve_positions(const Geometry& geometry, const uint16_t* map, int64_t item,
                               const ConvolutionChunk& chunk, Sink& sink) {
  const int64_t rows = geometry.conv_rows, begin = item * rows, count = smaller(rows, geometry.images - begin);
  const int64_t padded = geometry.padded_channels, pixels = geometry.height * geometry.width;
  gather_positions(geometry, map, begin, count, rows, chunk.panel);

  const int64_t offsets[2] = {0, geometry.pair_rows * padded};
  for (int64_t position = 0; position < pixels; ++position) {
    int64_t taps[kTaps];
    const int64_t touching = taps_inside(geometry, position / geometry.width, position % geometry.width, taps);
    Segment segments[kTaps];
    for (int64_t i = 0; i < touching; ++i)
      segments[i] = {chunk.panel + (position + tap_shift(geometry, taps[i])) * rows * padded,
                     chunk.bank + geometry.filters_offset(taps[i], 0)};
    const PairProduct product{segments, touching, geometry.segment_depth, padded, geometry.filters_stride()};
    const int64_t first = begin * pixels + position;
    sink.begin({first, pixels, rows, count, count, first, count * pixels}, 0, rows / geometry.pair_rows);
    Pairs::multiply(product, offsets, rows / geometry.pair_rows, chunk.blocks, sink);
  }
}

// Item `item` of a convolution: one chunk, one bundle of output blocks.
template <Ending kEnding>
inline void convolution_item(const Geometry& geometry, int64_t item, const uint16_t* map, bool, const float*,
                             const float* bank, const ConvEpilogue<uint16_t>& epilogue, Ahead ahead,
                             float* scratch, std::atomic<bool>& poisoned, bool = false) {
  const auto [part, bundle] = geometry.conv_item(item);
  const int64_t first_block = bundle * geometry.conv_bundle_blocks;
  const int64_t blocks = smaller(geometry.conv_bundle_blocks, geometry.channel_blocks - first_block);
  uint16_t* panel = reinterpret_cast<uint16_t*>(scratch);
  const ConvolutionChunk chunk{
      blocks, reinterpret_cast<const uint16_t*>(bank) + geometry.filters_offset(0, first_block), panel};
  Finisher<kEnding> finisher(geometry, epilogue, ahead, first_block, scratch + geometry.conv_sums_at());
  if (geometry.method == Method::kLines) convolve_lines(geometry, map, part, chunk, finisher);
  else convolve_positions(geometry, map, part, chunk, finisher);
  if (finisher.end()) poisoned.store(true, std::memory_order_relaxed);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

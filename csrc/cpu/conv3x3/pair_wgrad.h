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
// shifts, and the inputs as pairs, which a tap shifts by whole rows of 64 bytes. Pairs of pixels take two copies of a
// block in turn, of those that begin at even pixels and at odd ones; a pixel of two images one.
//
// A slice is a run of chunks, summed in order into its own bank, [tap][output block][input][16 outputs], turned
// [tap][input block][output][16 inputs], which is finished like any other's (finish_gradient.h).
#pragma once

#include "cpu/conv3x3/pair_conv.h"
#include "cpu/conv3x3/pair_turned.h"

namespace wnfused::cpu::WNFUSED_ISA {

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
      const LinePieces pieces(p, count, width, line);
      pieces.store(panel, plane, run, count);
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
    interleave(geometry, map, begin * pixels + position, pixels, count, channel_block,
               target + position * rows * kLanes, sum);
}

WNFUSED_INLINE void multiply_tap(const Geometry& geometry, const GradientChunk& chunk, int64_t tap, int64_t segments) {
  int64_t offsets[kMaxGroups];
  const int64_t tile = geometry.pair_rows, groups = geometry.padded_channels / tile;
  const PairProduct product{chunk.segments, segments, geometry.wgrad_depth, geometry.wgrad_plane,
                            geometry.wgrad_run * kLanes, chunk.accumulate};
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
  const int64_t chunks = divide_up(geometry.height, geometry.wgrad_lines);
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
    multiply_tap(geometry, chunk, tap, segments);
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
    multiply_tap(geometry, chunk, tap, segments);
  }
}

// Item `item` of a weight gradient: one slice, one bundle of output blocks.
inline void weight_gradient_item(const Geometry& geometry, int64_t item, const uint16_t* x, const uint16_t* dy,
                                 float* banks, float* bias_gradients, float* scratch) {
  const auto [slice, bundle] = geometry.wgrad_item(item);
  const int64_t first_block = bundle * geometry.wgrad_bundle_blocks;
  const int64_t blocks = smaller(geometry.wgrad_bundle_blocks, geometry.channel_blocks - first_block);
  const int64_t block_stride = geometry.padded_channels * kLanes;
  const int64_t begin = slice * geometry.wgrad_slice_chunks;
  const int64_t end = smaller(begin + geometry.wgrad_slice_chunks, geometry.wgrad_chunks);
  GradientChunk chunk{};
  chunk.first_block = first_block;
  chunk.blocks = blocks;
  chunk.segments = reinterpret_cast<Segment*>(scratch);
  chunk.inputs = reinterpret_cast<uint16_t*>(scratch + geometry.wgrad_inputs_at());
  chunk.gradients = reinterpret_cast<uint16_t*>(scratch + geometry.wgrad_gradients_at());
  const bool turned = geometry.wgrad_turned;
  chunk.bank = banks + slice * geometry.gradient_size() + first_block * (turned ? kLanes * kLanes : block_stride);
  if (begin >= end) {
    // An empty batch. The item's blocks are one run, turned one of each input block.
    const int64_t runs = turned ? geometry.channel_blocks : 1, run = blocks * (turned ? kLanes * kLanes : block_stride);
    for (int64_t tap = 0; tap < kTaps; ++tap)
      for (int64_t i = 0; i < runs; ++i)
        __builtin_memset(chunk.bank + tap * geometry.gradient_stride + i * block_stride, 0, run * sizeof(float));
  }
  Block bias_gradient[kMaxBundleBlocks];
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

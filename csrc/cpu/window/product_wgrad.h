// The weight gradient of a convolution that is one matrix product, a window of one tap on every pixel: x' dy.
//
//   narrow   channels of x, packed   [channel][256 pixels]          the depth runs over pixels
//   wide     blocks of dy, packed    [block][256 pixels][16 lanes]
//
// A direct sum over 32 pixels at a time (wgrad.h) reads and writes the bank too often where there are many
// channels. Slices, and the order of their sum, are those of conv3x3/wgrad.h.
#pragma once

#include "cpu/products/gemm.h"
#include "cpu/window/window.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Item `item`: one slice of pixels, one bundle of output blocks.
inline void product_gradient_item(const Window& window, int64_t item, const float* x, const float* dy, float* banks,
                                  float* bias_gradients, float* scratch) {
  constexpr int64_t kWideStride = kDepthChunk * kLanes;
  const auto [slice, bundle] = window.wgrad_item(item);
  const int64_t first_block = bundle * window.wgrad_bundle_blocks;
  const int64_t blocks = smaller(window.wgrad_bundle_blocks, window.output_blocks - first_block);
  const int64_t inputs = window.bank_depth, col_stride = window.block_floats();
  float* bank = banks + slice * window.gradient_size() + first_block * col_stride;
  float* bias_gradient = bias_gradients + slice * window.padded_outputs + first_block * kLanes;
  float *narrow = scratch, *wide = narrow + kNarrowRows * kDepthChunk;
  for (int64_t b = 0; b < blocks; ++b) store(bias_gradient + b * kLanes, zero());

  const int64_t begin = slice * window.wgrad_slice_units;
  const int64_t end = smaller(begin + window.wgrad_slice_units, window.units(window.grids[0]));
  for (int64_t first = begin; first < end; first += kDepthChunk) {
    const int64_t pixels = smaller(kDepthChunk, end - first);
    const Runs<float> outputs{dy + first * window.padded_outputs, pixels, window.padded_outputs, nullptr};
    for (int64_t b = 0; b < blocks; ++b) {
      float* target = wide + b * kWideStride;
      pack_wide_across<Singles>(outputs, (first_block + b) * kLanes, 0, pixels, kWideStride, target);
      Block sum = zero();
      for (int64_t t = 0; t < pixels; ++t) sum = sum + load(target + t * kLanes);
      store(bias_gradient + b * kLanes, load(bias_gradient + b * kLanes) + sum);
    }
    const Runs<float> channels{x + first * inputs, pixels, inputs, nullptr};
    for (int64_t row = 0; row < inputs; row += kNarrowRows) {
      const int64_t rows = smaller(kNarrowRows, inputs - row);
      pack_narrow_across<Singles>(channels, row, rows, 0, pixels, narrow);
      Singles::multiply(narrow, rows, wide, kWideStride, blocks, pixels, bank + row * kLanes, kLanes, col_stride,
                        first > begin);
    }
  }
}

}  // namespace wnfused::cpu::WNFUSED_ISA

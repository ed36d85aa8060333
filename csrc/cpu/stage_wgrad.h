// The weight gradient of one convolution of the stage, as a bank: dW[plane] = panel' x gradient panel.
//
//   a slice (consecutive units), a group of output blocks:
//        x map    --gather-->  panel     [plane][input block][rows][16]  --+
//                                                                          +--> outer products, bank of the slice
//        dy map   --gather-->  gradient  [plane][output block][rows][16] --+    [plane][output block][input][16]
//
//   Winograd: the input's panel is that of the forward; output gradients of a 2x2 tile become A y A', 16 planes.
//   direct:   one plane of gradients meets the panels of nine taps.
//
// Eight (or 16) inputs x 2 (or 1) output blocks are held in registers over the rows of a panel; the bank is read and
// written once a panel. Slices are summed, in order, when the gradient is finished (stage_pack.h), so that the order of
// every sum is fixed by the shape. The bias gradient is summed along the way.
#pragma once

#include "stage_conv.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Gradients of `count` units for output blocks [first_block, first_block + blocks), added to bias_gradient too.
template <bool Round>
inline void gather_gradients(const Geometry& geometry, const float* map, int64_t first, int64_t count,
                             int64_t first_block, int64_t blocks, const Panel& panel, float* bias_gradient) {
  const int64_t channels = geometry.padded_channels;
  for (int64_t b = 0; b < blocks; ++b) {
    const float* source = map + (first_block + b) * kLanes;
    const auto at = [&](int64_t pixel) {
      const Block value = load(source + pixel * channels);
      return Round ? round_to_bfloat16(value) : value;
    };
    Block sum = zero();
    Unit unit = unit_at(geometry, first);
    for (int64_t t = 0; t < count; ++t, advance(geometry, unit)) {
      const int64_t pixel = pixel_index(geometry, unit);
      if (geometry.method == Method::kDirect) {
        const Block value = at(pixel);
        sum = sum + value;
        store(panel.at(0, b, t), value);
        continue;
      }
      const bool two_rows = unit.y + 1 < geometry.height, two_columns = unit.x + 1 < geometry.width;
      const int64_t below = pixel + geometry.width;
      Block tile[2][2];
      tile[0][0] = at(pixel);
      tile[0][1] = two_columns ? at(pixel + 1) : zero();
      tile[1][0] = two_rows ? at(below) : zero();
      tile[1][1] = two_rows && two_columns ? at(below + 1) : zero();
      sum = sum + ((tile[0][0] + tile[0][1]) + (tile[1][0] + tile[1][1]));
      gradient_transform(tile, panel.at(0, b, t), panel.plane_stride);
    }
    float* target = bias_gradient + (first_block + b) * kLanes;
    store(target, load(target) + sum);
  }
}

// bank (+)= panel' x gradients for every input block of one plane.
inline void multiply_plane(const Geometry& geometry, const Panel& panel, int64_t panel_plane, const Panel& gradients,
                           int64_t gradient_plane, int64_t count, int64_t blocks, bool accumulate, float* bank) {
  for (int64_t b = 0; b < geometry.channel_blocks; ++b)
    multiply_outer(panel.at(panel_plane, b, 0), gradients.at(gradient_plane, 0, 0), gradients.rows * kLanes, count,
                   blocks, accumulate, bank + b * kLanes * kLanes, geometry.padded_channels * kLanes);
}

// Item `item` of a weight gradient: one slice of units, one group of output blocks. x is the convolution's input, dy
// the gradient of its output (up to the scale of a row, which finish_gradient applies); each is rounded to bfloat16 on
// the way if it is not an operand yet.
template <bool RoundX, bool RoundGradient>
inline void weight_gradient_item(const Geometry& geometry, int64_t item, const float* x, const float* dy,
                                 const float* zeros, float* banks, float* bias_gradients, float* scratch) {
  const int64_t slice = item / geometry.wgrad_groups, group = item % geometry.wgrad_groups;
  const int64_t first_block = group * geometry.wgrad_group_blocks;
  const int64_t blocks = smaller(geometry.wgrad_group_blocks, geometry.channel_blocks - first_block);
  const int64_t block_stride = geometry.padded_channels * kLanes;
  float* bank = banks + slice * geometry.gradient_size() + first_block * block_stride;
  float* bias_gradient = bias_gradients + slice * geometry.padded_channels;
  const int64_t begin = slice * geometry.wgrad_slice_units;
  const int64_t end = smaller(begin + geometry.wgrad_slice_units, geometry.units);
  // Winograd's first panel writes every plane; a tap that no pixel of the slice reaches would stay unwritten.
  const bool direct = geometry.method == Method::kDirect;
  for (int64_t p = 0; p < geometry.planes && (direct || begin >= end); ++p)
    __builtin_memset(bank + p * geometry.plane_stride, 0, blocks * block_stride * sizeof(float));
  __builtin_memset(bias_gradient + first_block * kLanes, 0, blocks * kLanes * sizeof(float));

  const Panel panel(scratch, geometry.wgrad_rows, geometry.channel_blocks);
  const Panel gradients(scratch + geometry.planes * panel.plane_stride, geometry.wgrad_rows, blocks);
  for (int64_t first = begin; first < end; first += geometry.wgrad_rows) {
    const int64_t count = smaller(geometry.wgrad_rows, end - first);
    gather_gradients<RoundGradient>(geometry, dy, first, count, first_block, blocks, gradients, bias_gradient);
    if (geometry.method == Method::kWinograd) {
      gather_tiles<RoundX>(geometry, x, zeros, first, count, panel);
      for (int64_t p = 0; p < kPositions; ++p)
        multiply_plane(geometry, panel, p, gradients, p, count, blocks, first > begin, bank + p * geometry.plane_stride);
    } else {
      for (int tap = 0; tap < kTaps; ++tap)
        if (gather_tap<RoundX>(geometry, x, first, count, tap, panel, tap))
          multiply_plane(geometry, panel, tap, gradients, 0, count, blocks, true, bank + tap * geometry.plane_stride);
    }
  }
}

}  // namespace wnfused::cpu::WNFUSED_ISA

// The weight gradient of one convolution of a stage, or of a layer, as a bank: dW[plane] = panel' x gradient panel.
//
//   a slice (consecutive units), a bundle of output blocks:
//        x map    --gather-->  panel     [plane][input block][rows][16]  --+
//                                                                          +--> outer products, bank of the slice
//        dy map   --gather-->  gradient  [plane][output block][rows][16] --+    [plane][output block][input][16]
//
//   Winograd: the input's panel is that of the forward; output gradients of a tile become A y A', 16 or 36 planes.
//   direct:   one plane of gradients meets the panels of nine taps.
//
// Eight (or 16) inputs x 2 (or 1) output blocks are held in registers over the rows of a panel; sums are read and
// written once a panel. Winograd's 16 or 36 planes of sums are a worker's own and become the nine taps of the slice's
// bank at its end: whoever finishes the gradient (finish_gradient.h) may be on another core, and a line that crosses
// over costs as much as a hundred multiply-adds. Slices are summed there, in order, so that the order of every sum is
// fixed by the shape. The bias gradient is summed along the way.
#pragma once

#include "cpu/conv3x3/conv.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Gradients of `count` tiles for output blocks [first_block, first_block + blocks), added to bias_gradient too, unless
// that is null.
template <int M, bool Round>
inline void gather_tile_gradients(const Geometry& geometry, const float* map, int64_t first, int64_t count,
                                  int64_t first_block, int64_t blocks, const Panel& panel, float* bias_gradient) {
  const int64_t channels = geometry.padded_outputs;
  for (int64_t b = 0; b < blocks; ++b) {
    const float* source = map + (first_block + b) * kLanes;
    alignas(64) float sum[kLanes] = {};
    Unit unit = unit_at(geometry, first);
    for (int64_t t = 0; t < count; ++t, advance(geometry, unit)) {
      const int64_t lines = geometry.height - unit.y, columns = geometry.width - unit.x;
      const float* corner = source + pixel_index(geometry, unit) * channels;
      const auto transform = [&](auto whole) __attribute__((always_inline)) {
        const auto pixel = [&](int i, int j, int part) __attribute__((always_inline)) {
          if (!whole.value && (i >= lines || j >= columns)) return Native{};
          const Native value = load_native(corner + (i * geometry.width + j) * channels + part);
          return Round ? native_round_to_bfloat16(value) : value;
        };
        gradient_transform<M>(pixel, panel.at(0, b, t), panel.plane_stride, sum);
      };
      if (lines >= M && columns >= M) transform(std::true_type());
      else transform(std::false_type());
    }
    if (!bias_gradient) continue;
    float* target = bias_gradient + (first_block + b) * kLanes;
    store(target, load(target) + load(sum));
  }
}

// The same for `count` pixels.
template <bool Round>
inline void gather_pixel_gradients(const Geometry& geometry, const float* map, int64_t first, int64_t count,
                                   int64_t first_block, int64_t blocks, const Panel& panel, float* bias_gradient) {
  const int64_t channels = geometry.padded_outputs;
  for (int64_t b = 0; b < blocks; ++b) {
    const float* source = map + (first_block + b) * kLanes;
    Block sum = zero();
    Unit unit = unit_at(geometry, first);
    for (int64_t t = 0; t < count; ++t, advance(geometry, unit)) {
      Block value = load(source + pixel_index(geometry, unit) * channels);
      if constexpr (Round) value = round_to_bfloat16(value);
      sum = sum + value;
      store(panel.at(0, b, t), value);
    }
    if (!bias_gradient) continue;
    float* target = bias_gradient + (first_block + b) * kLanes;
    store(target, load(target) + sum);
  }
}

// The sums of a slice: `planes` of [output block][input][16], which are its bank itself where a plane is a tap.
struct Sums {
  float* data;
  int64_t plane_stride;
};

// The taps of a slice from its sums.
template <int M>
inline void reduce_sums(const Geometry& geometry, const Sums& sums, int64_t floats, float* bank) {
  for (int64_t i = 0; i < floats; i += kLanes)
    filter_gradient<M>(sums.data + i, sums.plane_stride, bank + i, geometry.gradient_stride);
}

// bank (+)= panel' x gradients for every input block of one plane.
inline void multiply_plane(const Geometry& geometry, const Panel& panel, int64_t panel_plane, const Panel& gradients,
                           int64_t gradient_plane, int64_t count, int64_t blocks, bool accumulate, float* bank) {
  for (int64_t b = 0; b < geometry.depth_blocks; ++b)
    multiply_outer(panel.at(panel_plane, b, 0), gradients.at(gradient_plane, 0, 0), gradients.rows * kLanes, count,
                   blocks, accumulate, bank + b * kLanes * kLanes, geometry.gradient_floats());
}

// Item `item` of a weight gradient: one slice of units, one bundle of output blocks, one level of the kernel. x is the
// convolution's input, dy the gradient of its output (up to the scale of a row, which finish_gradient applies); each is
// rounded to bfloat16 on the way if it is not an operand yet.
//
// Groups of one slice read the same panels of x: those that fit are gathered once, and `left` to the next item.
template <bool RoundX, bool RoundGradient>
inline void weight_gradient_item(const Geometry& geometry, int64_t item, const float* x, const float* dy,
                                 const float* zeros, float* banks, float* bias_gradients, LeftPanels& left,
                                 float* scratch) {
  const auto [slice, level_bundle] = geometry.wgrad_item(item);
  const int64_t level = level_bundle % geometry.level_taps, bundle = level_bundle / geometry.level_taps;
  const int64_t first_block = bundle * geometry.wgrad_bundle_blocks;
  const int64_t blocks = smaller(geometry.wgrad_bundle_blocks, geometry.output_blocks - first_block);
  const int64_t block_stride = geometry.gradient_floats();
  const int64_t level_bank = level * kTaps * geometry.gradient_stride, step = level - geometry.level_taps / 2;
  float* bank = banks + slice * geometry.gradient_size() + level_bank + first_block * block_stride;
  float* bias_gradient = step == 0 ? bias_gradients + slice * geometry.padded_outputs : nullptr;
  const int64_t begin = slice * geometry.wgrad_slice_units;
  const int64_t end = smaller(begin + geometry.wgrad_slice_units, geometry.units);
  // Winograd's first panel writes every plane; a tap that no pixel of the slice reaches would stay unwritten.
  const bool direct = geometry.method == Method::kDirect;
  for (int tap = 0; tap < kTaps && (direct || begin >= end); ++tap)
    __builtin_memset(bank + tap * geometry.gradient_stride, 0, blocks * block_stride * sizeof(float));
  if (bias_gradient) __builtin_memset(bias_gradient + first_block * kLanes, 0, blocks * kLanes * sizeof(float));

  const Panel panel(scratch, geometry.wgrad_rows, geometry.depth_blocks);
  const bool keeps = geometry.wgrad_kept_panels > 0;
  const Panel behind = panel.after(geometry.planes * (keeps ? geometry.wgrad_kept_panels : 1));
  const Panel gradients(behind.data, geometry.wgrad_rows, blocks);
  const Sums sums = direct ? Sums{bank, geometry.gradient_stride}
                           : Sums{gradients.data + geometry.planes * gradients.plane_stride, geometry.sums_stride()};
  const auto gather_inputs = geometry.tile == 4 ? gather_tiles<4, RoundX> : gather_tiles<2, RoundX>;
  const auto gather_gradients = direct               ? gather_pixel_gradients<RoundGradient>
                                : geometry.tile == 4 ? gather_tile_gradients<4, RoundGradient>
                                                     : gather_tile_gradients<2, RoundGradient>;
  x += geometry.source_block(first_block) * kLanes;
  if (!keeps) left.forget();
  const bool gathered = keeps && left.hold(LeftPanels::Of::kSlice, slice);
  for (int64_t first = begin; first < end; first += geometry.wgrad_rows) {
    const int64_t count = smaller(geometry.wgrad_rows, end - first);
    gather_gradients(geometry, dy, first, count, first_block, blocks, gradients, bias_gradient);
    if (geometry.is_winograd()) {
      const Panel inputs = panel.after(keeps ? (first - begin) / geometry.wgrad_rows * geometry.planes : 0);
      if (!gathered) gather_inputs(geometry, x, zeros, first, count, step, inputs);
      for (int64_t p = 0; p < geometry.planes; ++p)
        multiply_plane(geometry, inputs, p, gradients, p, count, blocks, first > begin,
                       sums.data + p * sums.plane_stride);
    } else {
      for (int tap = 0; tap < kTaps; ++tap)
        if (gather_tap<RoundX>(geometry, x, first, count, tap, panel, tap))
          multiply_plane(geometry, panel, tap, gradients, 0, count, blocks, true, sums.data + tap * sums.plane_stride);
    }
  }
  if (direct || begin >= end) return;
  const auto reduce = geometry.tile == 4 ? reduce_sums<4> : reduce_sums<2>;
  reduce(geometry, sums, blocks * block_stride, bank);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

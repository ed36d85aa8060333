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
// written once a panel. Winograd's 16 or 36 planes of sums are a worker's own and become nine taps of the slice's bank:
// whoever finishes the gradient (finish_gradient.h) may be on another core, and a line that crosses over costs as much
// as a hundred multiply-adds. Where all panels of a slice are there at once the sums are of one input block at a time;
// where there is one slice alone, a layer's bank is a worker's own as well, who finishes it at once. Slices are summed
// there, in order, so that the order of every sum is fixed by the shape. The bias gradient is summed along the way.
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

// `planes` of sums, [output block][input][16].
struct Sums {
  float* data;
  int64_t plane_stride;
};

// `floats` of every tap, from so many sums of every plane.
template <int M>
inline void reduce_sums(const Geometry& geometry, const Sums& sums, int64_t floats, float* bank) {
  for (int64_t i = 0; i < floats; i += kLanes)
    filter_gradient<M>(sums.data + i, sums.plane_stride, bank + i, geometry.gradient_stride);
}

// What is summed at a time: units of a slice, a bundle of output blocks, one level of the kernel.
struct GradientPart {
  int64_t begin, end;
  int64_t first_block, blocks;
  int64_t level;

  int64_t count(int64_t first, int64_t rows) const { return smaller(rows, end - first); }
};

// The part's output blocks, from its first one on, that an input block has weights for.
WNFUSED_INLINE BlockRange met_outputs(const Geometry& geometry, const GradientPart& part, int64_t input_block) {
  if (geometry.sharing == 1) return {0, part.blocks};
  const int64_t first = part.first_block % geometry.group_blocks;
  const BlockRange met = geometry.met_blocks(part.first_block - first + input_block);
  return {greater(met.begin - first, 0), smaller(met.end - first, part.blocks)};
}

// bank (+)= panel' x gradients for every input block of one plane.
inline void multiply_plane(const Geometry& geometry, const GradientPart& part, const Panel& panel, int64_t panel_plane,
                           const Panel& gradients, int64_t gradient_plane, int64_t count, bool accumulate,
                           float* bank) {
  for (int64_t b = 0; b < geometry.source_blocks(part.first_block); ++b) {
    const BlockRange met = met_outputs(geometry, part, b);
    if (met.begin >= met.end) continue;
    multiply_outer(panel.at(panel_plane, b, 0), gradients.at(gradient_plane, met.begin, 0), gradients.rows * kLanes,
                   count, met.count(), accumulate, bank + met.begin * geometry.gradient_floats() + b * kLanes * kLanes,
                   geometry.gradient_floats());
  }
}

// The maps that it is summed from. x: from the first channel that the outputs sum over.
struct GradientMaps {
  const float *x, *dy, *zeros;
};

// Taps of a part, pixel by pixel.
template <bool RoundX, bool RoundGradient>
inline void sum_pixel_products(const Geometry& geometry, const GradientPart& part, const GradientMaps& maps,
                               float* bank, float* bias_gradient, float* scratch) {
  const int64_t rows = geometry.wgrad_rows;
  const Panel panel(scratch, rows, geometry.depth_blocks);
  const Panel gradients(scratch + geometry.gradient_panels_at(), rows, part.blocks);
  for (int64_t first = part.begin; first < part.end; first += rows) {
    const int64_t count = part.count(first, rows);
    gather_pixel_gradients<RoundGradient>(geometry, maps.dy, first, count, part.first_block, part.blocks, gradients,
                                          bias_gradient);
    for (int tap = 0; tap < kTaps; ++tap)
      if (gather_tap<RoundX>(geometry, maps.x, first, count, tap, panel, tap))
        multiply_plane(geometry, part, panel, tap, gradients, 0, count, true,
                       bank + tap * geometry.gradient_stride);
  }
}

// Winograd's panels of inputs and gradients that are there already.
struct Gathered {
  bool inputs, gradients;
};

// Taps of a part, tile by tile: panel after panel, each over all planes, whose sums are of all inputs.
template <int M, bool RoundX, bool RoundGradient>
inline void sum_tile_products(const Geometry& geometry, const GradientPart& part, const GradientMaps& maps,
                              float* bank, float* bias_gradient, float* scratch) {
  const int64_t rows = geometry.wgrad_rows, step = part.level - geometry.level_taps / 2;
  const Panel inputs(scratch, rows, geometry.depth_blocks);
  const Panel gradients(scratch + geometry.gradient_panels_at(), rows, part.blocks);
  const Sums sums{scratch + geometry.sums_at(), geometry.sums_stride()};
  for (int64_t first = part.begin; first < part.end; first += rows) {
    const int64_t count = part.count(first, rows);
    gather_tile_gradients<M, RoundGradient>(geometry, maps.dy, first, count, part.first_block, part.blocks, gradients,
                                            bias_gradient);
    gather_tiles<M, RoundX>(geometry, maps.x, maps.zeros, first, count, step,
                            geometry.source_blocks(part.first_block), inputs);
    for (int64_t p = 0; p < geometry.planes; ++p)
      multiply_plane(geometry, part, inputs, p, gradients, p, count, first > part.begin,
                     sums.data + p * sums.plane_stride);
  }
  for (int64_t c = 0; c < part.blocks; ++c) {
    const BlockRange met = geometry.met_blocks(part.first_block + c);
    const int64_t at = c * geometry.gradient_floats() + met.begin * kLanes * kLanes;
    reduce_sums<M>(geometry, {sums.data + at, sums.plane_stride}, met.count() * kLanes * kLanes, bank + at);
  }
}

// The same where all of the slice's panels are gathered at once: block by block of the inputs, so that a block's sums
// over all planes stay in a near cache.
template <int M, bool RoundX, bool RoundGradient>
inline void sum_tile_products_by_blocks(const Geometry& geometry, const GradientPart& part, const GradientMaps& maps,
                                        const Gathered& gathered, float* bank, float* bias_gradient, float* scratch) {
  const int64_t rows = geometry.wgrad_rows, step = part.level - geometry.level_taps / 2;
  const auto inputs = [&](int64_t i) {
    return Panel::by_blocks(scratch + i * geometry.input_panel(), rows, geometry.planes);
  };
  const auto gradients = [&](int64_t i) {
    return Panel(scratch + geometry.gradient_panels_at() + i * geometry.gradient_panel(), rows, part.blocks);
  };
  const Sums sums{scratch + geometry.sums_at(), geometry.sums_stride()};
  const int64_t blocks = geometry.source_blocks(part.first_block);
  int64_t panels = 0;
  for (int64_t first = part.begin; first < part.end; first += rows, ++panels) {
    const int64_t count = part.count(first, rows);
    if (!gathered.gradients)
      gather_tile_gradients<M, RoundGradient>(geometry, maps.dy, first, count, part.first_block, part.blocks,
                                              gradients(panels), bias_gradient);
    if (!gathered.inputs)
      gather_tiles<M, RoundX>(geometry, maps.x, maps.zeros, first, count, step, blocks, inputs(panels));
  }
  constexpr int64_t kSquare = kLanes * kLanes;
  for (int64_t b = 0; b < blocks; ++b) {
    const BlockRange met = met_outputs(geometry, part, b);
    for (int64_t p = 0; p < geometry.planes && met.begin < met.end; ++p)
      for (int64_t i = 0; i < panels; ++i)
        multiply_outer(inputs(i).at(p, b, 0), gradients(i).at(p, met.begin, 0), rows * kLanes,
                       part.count(part.begin + i * rows, rows), met.count(), i > 0,
                       sums.data + p * sums.plane_stride + met.begin * kSquare, kSquare);
    for (int64_t c = met.begin; c < met.end; ++c)
      reduce_sums<M>(geometry, {sums.data + c * kSquare, sums.plane_stride}, kSquare,
                     bank + c * geometry.gradient_floats() + b * kSquare);
  }
}

// Taps of a part, at `bank`, and the sums of its gradients if bias_gradient is not null.
template <bool RoundX, bool RoundGradient>
inline void sum_products(const Geometry& geometry, const GradientPart& part, const GradientMaps& maps,
                         const Gathered& gathered, float* bank, float* bias_gradient, float* scratch) {
  const bool direct = geometry.method == Method::kDirect;
  const bool none = part.begin >= part.end || !geometry.meets_level(part.level);
  // Winograd writes every tap at once; one that no pixel of the slice reaches would stay unwritten.
  for (int tap = 0; tap < kTaps && (direct || none); ++tap)
    __builtin_memset(bank + tap * geometry.gradient_stride, 0,
                     part.blocks * geometry.gradient_floats() * sizeof(float));
  if (bias_gradient)
    __builtin_memset(bias_gradient + part.first_block * kLanes, 0, part.blocks * kLanes * sizeof(float));
  if (none) return;
  if (direct)
    return sum_pixel_products<RoundX, RoundGradient>(geometry, part, maps, bank, bias_gradient, scratch);
  if (geometry.wgrad_panels) {
    const auto sum = geometry.tile == 4 ? sum_tile_products_by_blocks<4, RoundX, RoundGradient>
                                        : sum_tile_products_by_blocks<2, RoundX, RoundGradient>;
    return sum(geometry, part, maps, gathered, bank, bias_gradient, scratch);
  }
  const auto sum = geometry.tile == 4 ? sum_tile_products<4, RoundX, RoundGradient>
                                      : sum_tile_products<2, RoundX, RoundGradient>;
  sum(geometry, part, maps, bank, bias_gradient, scratch);
}

inline GradientPart gradient_part(const Geometry& geometry, int64_t slice, int64_t bundle, int64_t level) {
  const int64_t begin = slice * geometry.wgrad_slice_units, first_block = bundle * geometry.wgrad_bundle_blocks;
  return {begin, smaller(begin + geometry.wgrad_slice_units, geometry.units), first_block,
          smaller(geometry.wgrad_bundle_blocks, geometry.output_blocks - first_block), level};
}

// Whether the panels of x that a slice needs were left by the item before.
WNFUSED_INLINE bool finds_inputs(const Geometry& geometry, int64_t slice, LeftPanels& left) {
  if (geometry.wgrad_keeps) return left.hold(LeftPanels::Of::kSlice, slice);
  left.forget();
  return false;
}

// Item `item` of a weight gradient: one slice of units, one bundle of output blocks, one level of the kernel. x is the
// convolution's input, dy the gradient of its output (up to the scale of a row, which finish_gradient applies); each is
// rounded to bfloat16 on the way if it is not an operand yet.
//
// Bundles of one slice read the same panels of x: those that fit are gathered once, and `left` to the next item.
template <bool RoundX, bool RoundGradient>
inline void weight_gradient_item(const Geometry& geometry, int64_t item, const float* x, const float* dy,
                                 const float* zeros, float* banks, float* bias_gradients, LeftPanels& left,
                                 float* scratch) {
  const auto [slice, level_bundle] = geometry.wgrad_item(item);
  const int64_t level = level_bundle % geometry.level_taps, bundle = level_bundle / geometry.level_taps;
  const GradientPart part = gradient_part(geometry, slice, bundle, level);
  const GradientMaps maps{x + geometry.source_block(part.first_block) * kLanes, dy, zeros};
  float* bank = banks + slice * geometry.gradient_size() + level * kTaps * geometry.gradient_stride +
                geometry.gradient_offset(part.first_block);
  float* bias_gradient = level == geometry.level_taps / 2 ? bias_gradients + slice * geometry.padded_outputs : nullptr;
  sum_products<RoundX, RoundGradient>(geometry, part, maps, {finds_inputs(geometry, slice, left), false}, bank,
                                      bias_gradient, scratch);
}

// The same of the only slice, all levels, with a bank in `scratch`; finish(output block, its part of the bank) follows.
template <class Finish>
inline void finished_gradient_item(const Geometry& geometry, int64_t bundle, const float* x, const float* dy,
                                   const float* zeros, float* bias_gradient, LeftPanels& left, float* scratch,
                                   const Finish& finish) {
  float* bank = scratch + geometry.own_gradient_at();
  GradientPart part = gradient_part(geometry, 0, bundle, 0);
  const GradientMaps maps{x + geometry.source_block(part.first_block) * kLanes, dy, zeros};
  Gathered gathered{finds_inputs(geometry, 0, left), false};
  // The middle one, which every volume meets, gathers the gradients for all and sums them for the bias.
  const int64_t middle = geometry.level_taps / 2;
  for (int64_t i = 0; i < geometry.level_taps; ++i) {
    part.level = (middle + i) % geometry.level_taps;
    sum_products<false, false>(geometry, part, maps, gathered, bank + part.level * kTaps * geometry.gradient_stride,
                               i == 0 ? bias_gradient : nullptr, scratch);
    gathered.gradients = geometry.wgrad_panels > 0;
  }
  for (int64_t b = 0; b < part.blocks; ++b) finish(part.first_block + b, bank + geometry.gradient_offset(b));
}

}  // namespace wnfused::cpu::WNFUSED_ISA

// What the phases of a single convolution layer are made of (driver.h), on pairs of bfloat16 and maps of operands.
#pragma once

#include "cpu/conv_layer/conv_layer.h"
#include "cpu/pair_window/pack.h"
#include "cpu/pair_window/wgrad.h"

namespace wnfused::cpu::WNFUSED_ISA {

// The sums over `count` pixels, each channel's.
inline void sum_operands(const uint16_t* pixels, int64_t count, int64_t channels, float* sums) {
  for (int64_t k = 0; k < channels; k += kLanes) {
    const int64_t lanes = smaller(channels - k, kLanes);
    Block sum = zero();
    for (int64_t t = 0; t < count; ++t) {
      const uint16_t* pixel = pixels + t * channels + k;
      sum = sum + (lanes == kLanes ? load(pixel) : load(pixel, lanes));
    }
    store(sums + k, sum);
  }
}

// Item `item` of dz: dy where the activation was passed, else `slope` of it; and its sum over pixels.
inline void mask_operands(const ConvBackward<PairWindow>& job, int64_t item, float* scratch) {
  const MapShape& map = job.output;
  const PixelRun run = map_run(map, item);
  const int64_t first = first_entry(map, run), count = (run.end - run.begin) * map.channels;
  uint16_t* dz = operand(job.dz) + first;
  if (job.make_dz && !job.dy.is_in_place()) read_operand(map, job.dy.given, run, dz);
  if (job.activation != Activation::kNone) {
    const uint16_t *y = operand(job.y) + first, *dy = job.dy.is_in_place() ? operand(job.dy) + first : dz;
    if (!job.y.is_in_place()) {
      uint16_t* copy = reinterpret_cast<uint16_t*>(scratch);
      read_operand(map, job.y.given, run, copy);
      y = copy;
    }
    const bool leaky = job.activation == Activation::kLeakyRelu;
    const Block slope = splat(job.slope);
    for (int64_t k = 0; k < count; k += kLanes) {
      const int64_t lanes = smaller(count - k, kLanes);
      const bool whole = lanes == kLanes;
      const Block passed = whole ? load(y + k) : load(y + k, lanes),
                  gradient = whole ? load(dy + k) : load(dy + k, lanes);
      const Block value = leaky ? leaky_mask(passed, gradient, slope) : relu_mask(passed, gradient);
      if (whole) {
        store_rounded(dz + k, value);
      } else {
        uint16_t entries[kLanes];
        store_rounded(entries, value);
        copy_entries(dz + k, entries, lanes);
      }
    }
  }
  if (job.bias_sums) sum_operands(dz, run.end - run.begin, map.channels, job.bias_sums + item * map.padded_channels);
  if (job.dz.is_copied()) write_operand(map, dz, run, job.dz.given);
}

template <bool kIsTransposed>
struct PairParts {
  using G = PairWindow;
  struct Left {};
  static constexpr bool kTransposed = kIsTransposed;

  static void begin() { Pairs::begin(); }
  static void end() { Pairs::end(); }

  static bool finishes_with_sums(const G&) { return false; }

  static void read(const MapShape& shape, const LayerMap& map, int64_t item) {
    const PixelRun run = map_run(shape, item);
    read_operand(shape, map.given, run, operand(map) + first_entry(shape, run));
  }

  static void write(const MapShape& shape, const LayerMap& map, int64_t item) {
    const PixelRun run = map_run(shape, item);
    write_operand(shape, operand(map) + first_entry(shape, run), run, map.given);
  }

  template <class Job>
  static void read_input(const Job& job, int64_t item) {
    read(job.input, job.x, item);
  }

  static int64_t row_floats(const ConvForward<G>& job) {
    return (kTransposed ? job.output.channels : job.input.channels) * job.geometry.row_taps;
  }

  static void pack(const ConvForward<G>& job, int64_t block, const Bank& bank, float* norm, float* scratch) {
    uint16_t* weights = block_of(job.geometry, block, bank);
    if constexpr (kTransposed) {
      for (int64_t i = block * kLanes; i < (block + 1) * kLanes; ++i)
        bank.bias[i] = i < job.output.channels && job.bias.data ? cpu::WNFUSED_ISA::read(job.bias, i) : 0.0f;
      pack_turned_pair_window(job, job.geometry, block, weights, scratch);
    } else {
      Block scale[kLanes];
      splat_lanes(measure_scales(job, job.geometry.target.channels, row_floats(job), 0, block, bank.bias, norm), scale);
      pack_pair_window(job.geometry, job.v, block, scale, weights, scratch);
    }
  }

  static void pack(const ConvBackward<G>& job, int64_t block, const Bank& bank, float* scratch) {
    uint16_t* weights = block_of(job.back, block, bank);
    if constexpr (kTransposed) {
      Block scale[kLanes];
      known_scales(job, job.input.channels, block, scale);
      pack_pair_window(job.back, job.v, block, scale, weights, scratch);
    } else {
      pack_turned_pair_window(job, job.back, block, weights, scratch);
    }
  }

  template <class Job>
  static void convolve(const Job& job, const G& window, int64_t item, const LayerMaps& maps, const float* bank,
                       float* scratch, Left&) {
    const PairWindowEnding ending{operand(maps.target), operand(maps.residual), maps.bias, maps.activation, maps.slope};
    pair_window_item(window, item, operand(maps.source), bank, ending, scratch, *job.poisoned);
  }

  static void mask(const ConvBackward<G>& job, int64_t item, float* scratch) { mask_operands(job, item, scratch); }

  // Between the maps of the convolution that has v.
  static void weight_gradient(const ConvBackward<G>& job, int64_t item, float* scratch, Left&) {
    const uint16_t *from = operand(kTransposed ? job.dz : job.x), *to = operand(kTransposed ? job.x : job.dz);
    pair_window_gradient_item(job.products(), item, from, to, job.scratch.gradient[0], scratch);
  }

  static void finish(const ConvBackward<G>& job, int64_t block, float* scratch) {
    const Parameter dbias = kTransposed ? Parameter{} : job.dbias;
    finish_pair_gradient(job, job.products(), block, job.scratch.gradient[0], dbias, job.bias_sums, job.output.runs(),
                         scratch);
  }

 private:
  static uint16_t* block_of(const G& window, int64_t block, const Bank& bank) {
    return reinterpret_cast<uint16_t*>(bank.weights) + block * window.block_elements;
  }
};

}  // namespace wnfused::cpu::WNFUSED_ISA

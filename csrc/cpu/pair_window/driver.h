// The phases of a convolution layer on pairs of bfloat16: those of conv_layer.h, over maps of operands.
#pragma once

#include "cpu/conv/banks.h"
#include "cpu/pair_window/pack.h"
#include "cpu/pair_window/wgrad.h"

namespace wnfused::cpu::WNFUSED_ISA {

WNFUSED_INLINE void read_item(const MapShape& shape, const LayerMap& map, int64_t item) {
  const PixelRun run = map_run(shape, item);
  read_operand(shape, map.given, run, operand(map) + first_entry(shape, run));
}

WNFUSED_INLINE void write_item(const MapShape& shape, const LayerMap& map, int64_t item) {
  const PixelRun run = map_run(shape, item);
  write_operand(shape, operand(map) + first_entry(shape, run), run, map.given);
}

// kTransposed: the rows of v belong to x's channels, so every norm comes before the first product.
template <bool kTransposed>
void pair_window_forward(const ConvForward<PairWindow>& job, Worker& worker) {
  Pairs::begin();
  const PairWindow& window = job.geometry;
  float* scratch = job.scratch.worker + worker.index() * job.scratch.worker_stride;
  float* staging = scratch + job.scratch.packing;
  Banks banks(window, job.scratch, worker.index());
  const MapShape& rows = kTransposed ? job.input : job.output;
  const int64_t row_floats = (kTransposed ? job.output.channels : job.input.channels) * window.row_taps;
  const auto measure = [&](int64_t block) {
    measure_norms(job.v, rows.channels, row_floats, 0, block, job.norm);
  };
  const auto pack = [&](int64_t block, const Bank& bank, float* norm) {
    uint16_t* weights = reinterpret_cast<uint16_t*>(bank.weights) + block * window.block_elements;
    if constexpr (kTransposed) {
      for (int64_t i = block * kLanes; i < (block + 1) * kLanes; ++i)
        bank.bias[i] = i < job.output.channels && job.bias.data ? read(job.bias, i) : 0.0f;
      pack_turned_pair_window(job, window, block, weights, staging);
    } else {
      Block scale[kLanes];
      splat_lanes(measure_scales(job, window.target.channels, row_floats, 0, block, bank.bias, norm), scale);
      pack_pair_window(window, job.v, block, scale, weights, staging);
    }
  };
  const auto pack_shared = [&](int64_t block) { pack(block, job.scratch.bank[0], job.norm); };
  const bool own = window.own_banks;
  const int64_t inputs = count_of(job.x.is_copied(), job.input.runs());
  const int64_t added = count_of(job.residual.is_copied(), job.output.runs());
  const int64_t packs = count_of(!own && !job.is_packed(), window.output_blocks);
  const int64_t norms_first = count_of(kTransposed && job.norm && !job.is_packed(), rows.channel_blocks);
  worker.phase({inputs, added, kTransposed ? norms_first : packs}, [&](int64_t item) {
    if (item < inputs) return read_item(job.input, job.x, item);
    if ((item -= inputs) < added) return read_item(job.output, job.residual, item);
    if constexpr (kTransposed) measure(item - added);
    else pack_shared(item - added);
  });
  if constexpr (kTransposed) worker.phase({packs}, pack_shared);

  // A worker that packs alone meets every row once, as does the only item of a group of rows.
  const bool once = worker.is_alone() || (window.weights_stay && window.conv_chunks == 1);
  float* packed_norm = once ? job.norm : nullptr;
  const bool measured = !kTransposed && job.norm && own && !once;
  const int64_t items = window.conv_items();
  worker.phase({items, count_of(measured, rows.channel_blocks)}, [&](int64_t item) {
    if (item >= items) return measure(item - items);
    const Bank& bank = banks.of(0, item, [&](int64_t block, const Bank& target) { pack(block, target, packed_norm); });
    const PairWindowEnding ending{operand(job.y), operand(job.residual), bank.bias, job.activation, job.slope};
    pair_window_item(window, item, operand(job.x), bank.weights, ending, scratch, *job.poisoned);
  });
  worker.phase({count_of(job.y.is_copied(), job.output.runs())},
               [&](int64_t item) { write_item(job.output, job.y, item); });
  Pairs::end();
}

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

template <bool kTransposed>
void pair_window_backward(const ConvBackward<PairWindow>& job, Worker& worker) {
  Pairs::begin();
  // Of the weight's gradient, between the maps of the convolution that has v; and of dx.
  const PairWindow &window = job.products(), &back = job.back;
  float* scratch = job.scratch.worker + worker.index() * job.scratch.worker_stride;
  Banks banks(back, job.scratch, worker.index());
  const auto pack = [&](int64_t block, const Bank& bank) {
    uint16_t* weights = reinterpret_cast<uint16_t*>(bank.weights) + block * back.block_elements;
    float* staging = scratch + job.scratch.packing;
    if constexpr (kTransposed) {
      Block scale[kLanes];
      known_scales(job, job.input.channels, block, scale);
      pack_pair_window(back, job.v, block, scale, weights, staging);
    } else {
      pack_turned_pair_window(job, back, block, weights, staging);
    }
  };
  const bool input = job.dx.given.data != nullptr;
  const int64_t runs = job.output.runs(), masks = count_of(job.make_dz || job.bias_sums, runs);
  const int64_t inputs = count_of(job.weight && job.x.is_copied(), job.input.runs());
  const int64_t packs = count_of(input && !back.own_banks, back.output_blocks);
  worker.phase({masks, inputs, packs}, [&](int64_t item) {
    if (item < masks) return mask_operands(job, item, scratch);
    if ((item -= masks) < inputs) return read_item(job.input, job.x, item);
    pack(item - inputs, job.scratch.bank[0]);
  });

  const PairWindowEnding ending{operand(job.dx), nullptr, nullptr, Activation::kNone, 0.0f};
  const uint16_t *from = operand(kTransposed ? job.dz : job.x), *to = operand(kTransposed ? job.x : job.dz);
  const int64_t gradients = count_of(job.weight, window.wgrad_items());
  worker.phase({gradients, count_of(input, back.conv_items())}, [&](int64_t item) {
    if (item < gradients)
      return pair_window_gradient_item(window, item, from, to, job.scratch.gradient[0], scratch);
    item -= gradients;
    const Bank& bank = banks.of(0, item, pack);
    pair_window_item(back, item, operand(job.dz), bank.weights, ending, scratch, *job.poisoned);
  });

  // The bias belongs to y's channels, which are rows of v unless the layer is transposed.
  const int64_t finished = count_of(job.weight, window.output_blocks);
  const int64_t biases = count_of(kTransposed && job.bias_sums, job.output.channel_blocks);
  const Parameter dbias = kTransposed ? Parameter{} : job.dbias;
  worker.phase({finished, biases, count_of(job.dx.is_copied(), job.input.runs())}, [&](int64_t item) {
    if (item < finished)
      return finish_pair_gradient(job, window, item, job.scratch.gradient[0], dbias, job.bias_sums, runs, scratch);
    if ((item -= finished) < biases) return finish_bias(job.dbias, job.output, runs, job.bias_sums, item);
    write_item(job.input, job.dx, item - biases);
  });
  Pairs::end();
}

}  // namespace wnfused::cpu::WNFUSED_ISA

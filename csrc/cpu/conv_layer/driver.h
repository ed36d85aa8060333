// The phases of a single convolution layer (conv_layer.h), of parts that are one method's: parts.h, pair_parts.h.
//
// Parts::begin() and end() stand around all that a worker does. `left`: what it keeps of one item for its next one.
#pragma once

#include "cpu/conv/banks.h"
#include "cpu/conv/finish_rows.h"
#include "cpu/conv/layer_job.h"
#include "cpu/conv/maps.h"
#include "cpu/conv/parameter_rows.h"

namespace wnfused::cpu::WNFUSED_ISA {

template <class Parts>
void conv_layer_forward(const ConvForward<typename Parts::G>& job, Worker& worker) {
  Parts::begin();
  const auto& geometry = job.geometry;
  float* scratch = job.scratch.worker + worker.index() * job.scratch.worker_stride;
  float* packing = scratch + job.scratch.packing;
  Banks banks(geometry, job.scratch, worker.index());
  const bool own = geometry.own_banks;
  const int64_t inputs = count_of(job.x.is_copied(), job.input.runs());
  const int64_t added = count_of(job.residual.is_copied(), job.output.runs());
  const int64_t packs = count_of(!own && !job.is_packed(), geometry.output_blocks);
  // A row's norm is taken once: by whoever packs the row, if that is done but once; where every worker packs banks of
  // its own, by items of their own beside the products. A transposed layer's rows of v belong to x's channels, and all
  // norms come before the first product.
  const int64_t rows = Parts::kTransposed ? job.input.channels : job.output.channels;
  const int64_t row_blocks = divide_up(rows, kLanes);
  const auto measure = [&](int64_t block) {
    measure_norms(job.v, rows, Parts::row_floats(job), 0, block, job.norm);
  };
  const auto pack_shared = [&](int64_t block) { Parts::pack(job, block, job.scratch.bank[0], job.norm, packing); };
  const int64_t norms_first = count_of(Parts::kTransposed && job.norm && !job.is_packed(), row_blocks);
  worker.phase({inputs, added, Parts::kTransposed ? norms_first : packs}, [&](int64_t item) {
    if (item < inputs) return Parts::read_input(job, item);
    if ((item -= inputs) < added) return Parts::read(job.output, job.residual, item);
    if constexpr (Parts::kTransposed) measure(item - added);
    else pack_shared(item - added);
  });
  if constexpr (Parts::kTransposed) worker.phase({packs}, pack_shared);

  // A worker that packs alone meets every row once, as does the only item of a group of rows.
  const bool once = worker.is_alone() || (geometry.weights_stay && geometry.conv_chunks == 1);
  float* packed_norm = once ? job.norm : nullptr;
  typename Parts::Left left;
  const bool measured = job.norm && !Parts::kTransposed && own && !packed_norm;
  const int64_t items = geometry.conv_items(), norms = count_of(measured, row_blocks);
  worker.phase({items, norms}, [&](int64_t item) {
    if (item >= items) return measure(item - items);
    const Bank& bank = banks.of(
        0, item, [&](int64_t block, const Bank& target) { Parts::pack(job, block, target, packed_norm, packing); });
    const LayerMaps maps{job.x, job.y, job.residual, bank.bias, job.activation, job.slope};
    Parts::convolve(job, geometry, item, maps, bank.weights, scratch, left);
  });
  worker.phase({count_of(job.y.is_copied(), job.output.runs())},
               [&](int64_t item) { Parts::write(job.output, job.y, item); });
  Parts::end();
}

template <class Parts>
void conv_layer_backward(const ConvBackward<typename Parts::G>& job, Worker& worker) {
  Parts::begin();
  const auto& back = job.back;
  float* scratch = job.scratch.worker + worker.index() * job.scratch.worker_stride;
  float* packing = scratch + job.scratch.packing;
  Banks banks(back, job.scratch, worker.index());
  const bool input = job.dx.given.data != nullptr;
  const int64_t runs = job.output.runs(), masks = count_of(job.make_dz || job.bias_sums, runs);
  const int64_t inputs = count_of(job.weight && job.x.is_copied(), job.input.runs());
  const int64_t packs = count_of(input && !back.own_banks, back.output_blocks);
  worker.phase({masks, inputs, packs}, [&](int64_t item) {
    if (item < masks) return Parts::mask(job, item, scratch);
    if ((item -= masks) < inputs) return Parts::read_input(job, item);
    Parts::pack(job, item - inputs, job.scratch.bank[0], packing);
  });

  const LayerMap none{};
  const LayerMaps maps{job.dz, job.dx, none, nullptr, Activation::kNone, 0.0f};
  const auto& products = job.products();
  const int64_t gradients = count_of(job.weight, products.wgrad_items());
  typename Parts::Left left;
  worker.phase({gradients, count_of(input, back.conv_items())}, [&](int64_t item) {
    if (item < gradients) return Parts::weight_gradient(job, item, scratch, left);
    item -= gradients;
    const Bank& bank = banks.of(
        0, item, [&](int64_t block, const Bank& target) { Parts::pack(job, block, target, packing); });
    Parts::convolve(job, back, item, maps, bank.weights, scratch, left);
  });

  // The bias belongs to y's channels, which are rows of v unless the layer is transposed.
  const int64_t finished = count_of(job.weight && !Parts::finishes_with_sums(products), products.output_blocks);
  const int64_t biases = count_of(Parts::kTransposed && job.bias_sums, job.output.channel_blocks);
  worker.phase({finished, biases, count_of(job.dx.is_copied(), job.input.runs())}, [&](int64_t item) {
    if (item < finished) return Parts::finish(job, item, scratch);
    if ((item -= finished) < biases) return finish_bias(job.dbias, job.output, runs, job.bias_sums, item);
    Parts::write(job.input, job.dx, item - biases);
  });
  Parts::end();
}

}  // namespace wnfused::cpu::WNFUSED_ISA

// The phases of a single convolution layer (conv3x3.h), by the stage's items.
#pragma once

#include "conv3x3.h"
#include "stage_banks.h"
#include "stage_maps.h"
#include "stage_wgrad.h"

namespace wnfused::cpu::WNFUSED_ISA {

constexpr Upcoming kNothingUpcoming{nullptr, 0};

inline void conv3x3_forward(const Conv3x3Forward& job, Worker& worker) {
  const Geometry& geometry = job.geometry;
  float* scratch = job.scratch.worker + worker.index() * job.scratch.worker_stride;
  Banks banks(geometry, job.scratch, worker.index());
  const bool own = geometry.own_banks;
  const int64_t inputs = count_of(job.x.is_copied(), map_items(geometry));
  const int64_t added = count_of(job.residual.is_copied(), map_items(job.transposed));
  const int64_t packs = count_of(!own, geometry.output_blocks);
  worker.phase({inputs, added, packs}, [&](int64_t item) {
    if (item < inputs) return read_map(geometry, job.x.given, item, job.x.own);
    if ((item -= inputs) < added) return read_map(job.transposed, job.residual.given, item, job.residual.own);
    pack_forward(job, 0, item - added, job.scratch.bank[0], job.norm, scratch);
  });

  Epilogue<float> epilogue{};
  epilogue.operand = job.y.own;
  epilogue.other = job.residual.own;
  epilogue.activation = job.activation;
  epilogue.factor = job.slope;
  // A tensor that was just allocated is in no cache.
  epilogue.fresh = job.y.in_place && !geometry.weights_stay ? job.y.own : nullptr;
  const int64_t items = geometry.conv_items(), norms = count_of(own, geometry.output_blocks);
  worker.phase({items, norms}, [&](int64_t item) {
    if (item >= items) return measure_norms(job, 0, item - items, job.norm, scratch);
    const Bank& bank = banks.of(0, item, [&](int64_t block, const Bank& target) {
      pack_forward(job, 0, block, target, nullptr, scratch);
    });
    epilogue.bias = bank.bias;
    convolution_item<Ending::kLayer>(geometry, item, job.x.own, false, job.scratch.zeros, bank.weights, epilogue,
                                     kNothingUpcoming, scratch, *job.poisoned);
  });
  worker.phase({count_of(job.y.is_copied(), map_items(job.transposed))},
               [&](int64_t item) { write_map(job.transposed, job.y.own, item, job.y.given); });
}

// Item `item` of dz: dy where the activation was passed, else `slope` of it.
inline void mask_item(const Conv3x3Backward& job, int64_t item, float* scratch) {
  const Geometry& geometry = job.transposed;
  const PixelRun run = map_run(geometry, item);
  const int64_t first = (run.image * geometry.height * geometry.width + run.begin) * geometry.padded_channels;
  const int64_t floats = (run.end - run.begin) * geometry.padded_channels;
  float* dz = job.dz.own + first;
  const float* dy = dz;
  if (job.dy.in_place) dy = job.dy.own + first;
  else read_map(geometry, job.dy.given, item, job.dz.own);
  if (job.activation != Activation::kNone) {
    const float* y = scratch;
    if (job.y.in_place) y = job.y.own + first;
    else read_pixels(geometry, job.y.given, run, scratch);
    const Block slope = splat(job.activation == Activation::kLeakyRelu ? job.slope : 0.0f);
    for (int64_t k = 0; k < floats; k += kLanes) {
      const Block gradient = load(dy + k), passed = relu_mask(load(y + k), gradient);
      store(dz + k, job.activation == Activation::kRelu ? passed : multiply_add(slope, gradient - passed, passed));
    }
  }
  if (job.dz.is_copied()) write_map(geometry, job.dz.own, item, job.dz.given);
}

inline void conv3x3_backward(const Conv3x3Backward& job, Worker& worker) {
  const Geometry &geometry = job.geometry, &transposed = job.transposed;
  float* scratch = job.scratch.worker + worker.index() * job.scratch.worker_stride;
  Banks banks(transposed, job.scratch, worker.index());
  const bool input = job.dx.given.data != nullptr;
  const auto pack = [&](int64_t block, const Bank& bank) {
    pack_backward(job, transposed, 0, block, 1.0f, bank, scratch);
  };
  const int64_t masks = count_of(job.make_dz, map_items(transposed));
  const int64_t inputs = count_of(job.weight && job.x.is_copied(), map_items(geometry));
  const int64_t packs = count_of(input && !transposed.own_banks, transposed.output_blocks);
  worker.phase({masks, inputs, packs}, [&](int64_t item) {
    if (item < masks) return mask_item(job, item, scratch);
    if ((item -= masks) < inputs) return read_map(geometry, job.x.given, item, job.x.own);
    pack(item - inputs, job.scratch.bank[0]);
  });

  Epilogue<float> epilogue{};
  epilogue.operand = job.dx.own;
  epilogue.activation = Activation::kNone;
  epilogue.fresh = job.dx.in_place && !transposed.weights_stay ? job.dx.own : nullptr;
  const int64_t gradients = count_of(job.weight, geometry.wgrad_items());
  worker.phase({gradients, count_of(input, transposed.conv_items())}, [&](int64_t item) {
    if (item < gradients)
      return weight_gradient_item<false, false>(geometry, item, job.x.own, job.dz.own, job.scratch.zeros,
                                                job.scratch.gradient[0], job.scratch.bias_gradient[0], scratch);
    item -= gradients;
    const Bank& bank = banks.of(0, item, pack);
    convolution_item<Ending::kLayer>(transposed, item, job.dz.own, false, job.scratch.zeros, bank.weights, epilogue,
                                     kNothingUpcoming, scratch, *job.poisoned);
  });

  const int64_t finished = count_of(job.weight, geometry.output_blocks);
  worker.phase({finished, count_of(job.dx.is_copied(), map_items(geometry))}, [&](int64_t item) {
    if (item < finished)
      return finish_gradient(job, 0, item, 1.0f, job.scratch.gradient[0], job.scratch.bias_gradient[0], scratch);
    write_map(geometry, job.dx.own, item - finished, job.dx.given);
  });
}

}  // namespace wnfused::cpu::WNFUSED_ISA

// The phases of a single convolution layer (conv_layer.h).
#pragma once

#include "conv_layer.h"
#include "stage_banks.h"
#include "stage_maps.h"
#include "stage_wgrad.h"
#include "window_kernels.h"

namespace wnfused::cpu::WNFUSED_ISA {

// What the phases are made of, by the stage's convolution ..
struct WinogradParts {
  using G = Geometry;

  static int64_t row_floats(const G& geometry) { return geometry.channels * kTaps; }
  static bool has_border(const G&) { return false; }
  static void put(const G&, const PixelRun&, const float*, float*) {}

  static void read(const G& geometry, const ExternalMap& given, int64_t item, float* map, float*) {
    read_map(geometry, given, item, map);
  }

  static void pack(const ConvForward<G>& job, int64_t block, const Bank& bank, float* norm, float* scratch) {
    pack_forward(job, 0, block, bank, norm, scratch);
  }

  static void pack(const ConvBackward<G>& job, int64_t block, const Bank& bank, float* scratch) {
    pack_backward(job, job.transposed, 0, block, 1.0f, bank, scratch);
  }

  template <class Job>
  static void convolve(const Job& job, const G& geometry, int64_t item, const WindowMaps& maps, const float* bank,
                       float* scratch) {
    Epilogue<float> epilogue{};
    epilogue.operand = maps.target.own;
    epilogue.other = maps.residual.own;
    epilogue.bias = maps.bias;
    epilogue.activation = maps.activation;
    epilogue.factor = maps.slope;
    // A tensor that was just allocated is in no cache.
    epilogue.fresh = maps.target.is_in_place() && !geometry.weights_stay ? maps.target.own : nullptr;
    convolution_item<Ending::kLayer>(geometry, item, maps.source.own, false, job.scratch.zeros, bank, epilogue,
                                     {nullptr, 0}, scratch, *job.poisoned);
  }

  static void weight_gradient(const ConvBackward<G>& job, int64_t item, float* scratch) {
    weight_gradient_item<false, false>(job.geometry, item, job.x.own, job.dz.own, job.scratch.zeros,
                                       job.scratch.gradient[0], job.scratch.bias_gradient[0], scratch);
  }

  static void finish(const ConvBackward<G>& job, int64_t block, float* scratch) {
    finish_gradient(job, 0, block, 1.0f, job.scratch.gradient[0], job.scratch.bias_gradient[0], scratch);
  }
};

// .. and by a window's.
struct DirectParts {
  using G = Window;

  static int64_t row_floats(const G& window) { return window.source.channels * window.planes; }
  static bool has_border(const G& window) { return window.has_border(); }

  static void put(const G& window, const PixelRun& run, const float* pixels, float* map) {
    put_pixels(window, run, pixels, map);
  }

  static void read(const G& window, const ExternalMap& given, int64_t item, float* map, float* scratch) {
    read_source(window, given, item, map, scratch);
  }

  static void pack(const ConvForward<G>& job, int64_t block, const Bank& bank, float* norm, float* scratch) {
    const Window& window = job.geometry;
    Block scale[kLanes];
    measure_scales(job, window.target.channels, row_floats(window), 0, block, bank.bias, norm, scratch, scale);
    pack_window(window, job.v, window.target.channels, block, scale, bank.weights);
  }

  static void pack(const ConvBackward<G>& job, int64_t block, const Bank& bank, float*) {
    pack_transposed_window(job, job.transposed, block, bank.weights);
  }

  template <class Job>
  static void convolve(const Job& job, const G& window, int64_t item, const WindowMaps& maps, const float* bank,
                       float* scratch) {
    window_item(window, item, maps, bank, scratch, *job.poisoned);
  }

  static void weight_gradient(const ConvBackward<G>& job, int64_t item, float*) {
    window_gradient_item(job.geometry, job.transposed, item, job.x.own, job.dz.own, job.scratch.gradient[0],
                         job.scratch.bias_gradient[0]);
  }

  static void finish(const ConvBackward<G>& job, int64_t block, float* scratch) {
    finish_window_gradient(job, job.geometry, block, job.scratch.gradient[0], job.scratch.bias_gradient[0], scratch);
  }
};

template <class Parts>
void conv_layer_forward(const ConvForward<typename Parts::G>& job, Worker& worker) {
  const auto& geometry = job.geometry;
  float* scratch = job.scratch.worker + worker.index() * job.scratch.worker_stride;
  Banks banks(geometry, job.scratch, worker.index());
  const bool own = geometry.own_banks;
  const int64_t inputs = count_of(job.x.is_copied(), map_items(job.input));
  const int64_t added = count_of(job.residual.is_copied(), map_items(job.output));
  const int64_t packs = count_of(!own, geometry.output_blocks);
  worker.phase({inputs, added, packs}, [&](int64_t item) {
    if (item < inputs) return Parts::read(geometry, job.x.given, item, job.x.own, scratch);
    if ((item -= inputs) < added) return read_map(job.output, job.residual.given, item, job.residual.own);
    Parts::pack(job, item - added, job.scratch.bank[0], job.norm, scratch);
  });

  // Who packs alone meets every row once.
  float* packed_norm = worker.is_alone() ? job.norm : nullptr;
  const int64_t items = geometry.conv_items(), norms = count_of(own && !packed_norm, geometry.output_blocks);
  worker.phase({items, norms}, [&](int64_t item) {
    if (item >= items)
      return measure_norms(job.v, job.output.channels, Parts::row_floats(geometry), 0, item - items, job.norm, scratch);
    const Bank& bank = banks.of(0, item, [&](int64_t block, const Bank& target) {
      Parts::pack(job, block, target, packed_norm, scratch);
    });
    const WindowMaps maps{job.x, job.y, job.residual, bank.bias, job.activation, job.slope};
    Parts::convolve(job, geometry, item, maps, bank.weights, scratch);
  });
  worker.phase({count_of(job.y.is_copied(), map_items(job.output))},
               [&](int64_t item) { write_map(job.output, job.y.own, item, job.y.given); });
}

// Item `item` of dz: dy where the activation was passed, else `slope` of it. `scratch`: kMapPixels pixels, twice.
template <class Parts>
void mask_item(const ConvBackward<typename Parts::G>& job, int64_t item, float* scratch) {
  const MapShape& map = job.output;
  const PixelRun run = map_run(map, item);
  const int64_t first = (run.image * map.height * map.width + run.begin) * map.padded_channels;
  const int64_t floats = (run.end - run.begin) * map.padded_channels;
  const bool border = Parts::has_border(job.transposed);
  float* dz = border ? scratch + kMapPixels * map.padded_channels : job.dz.own + first;
  const float* dy = dz;
  if (job.dy.is_in_place()) dy = job.dy.own + first;
  else read_pixels(map, job.dy.given, run, dz);
  if (job.activation != Activation::kNone) {
    const float* y = scratch;
    if (job.y.is_in_place()) y = job.y.own + first;
    else read_pixels(map, job.y.given, run, scratch);
    const Block slope = splat(job.activation == Activation::kLeakyRelu ? job.slope : 0.0f);
    for (int64_t k = 0; k < floats; k += kLanes) {
      const Block gradient = load(dy + k), passed = relu_mask(load(y + k), gradient);
      store(dz + k, job.activation == Activation::kRelu ? passed : multiply_add(slope, gradient - passed, passed));
    }
    dy = dz;
  }
  if (border) Parts::put(job.transposed, run, dy, job.dz.own);
  if (job.dz.is_copied()) write_pixels(map, dy, run, job.dz.given);
}

template <class Parts>
void conv_layer_backward(const ConvBackward<typename Parts::G>& job, Worker& worker) {
  const auto &geometry = job.geometry, &transposed = job.transposed;
  float* scratch = job.scratch.worker + worker.index() * job.scratch.worker_stride;
  Banks banks(transposed, job.scratch, worker.index());
  const bool input = job.dx.given.data != nullptr;
  const int64_t masks = count_of(job.make_dz, map_items(job.output));
  const int64_t inputs = count_of(job.weight && job.x.is_copied(), map_items(job.input));
  const int64_t packs = count_of(input && !transposed.own_banks, transposed.output_blocks);
  worker.phase({masks, inputs, packs}, [&](int64_t item) {
    if (item < masks) return mask_item<Parts>(job, item, scratch);
    if ((item -= masks) < inputs) return Parts::read(geometry, job.x.given, item, job.x.own, scratch);
    Parts::pack(job, item - inputs, job.scratch.bank[0], scratch);
  });

  const LayerMap none{};
  const WindowMaps maps{job.dz, job.dx, none, nullptr, Activation::kNone, 0.0f};
  const int64_t gradients = count_of(job.weight, geometry.wgrad_items());
  worker.phase({gradients, count_of(input, transposed.conv_items())}, [&](int64_t item) {
    if (item < gradients) return Parts::weight_gradient(job, item, scratch);
    item -= gradients;
    const Bank& bank =
        banks.of(0, item, [&](int64_t block, const Bank& target) { Parts::pack(job, block, target, scratch); });
    Parts::convolve(job, transposed, item, maps, bank.weights, scratch);
  });

  const int64_t finished = count_of(job.weight, geometry.output_blocks);
  worker.phase({finished, count_of(job.dx.is_copied(), map_items(job.input))}, [&](int64_t item) {
    if (item < finished) return Parts::finish(job, item, scratch);
    write_map(job.input, job.dx.own, item - finished, job.dx.given);
  });
}

}  // namespace wnfused::cpu::WNFUSED_ISA

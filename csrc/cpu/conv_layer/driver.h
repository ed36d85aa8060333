// The phases of a single convolution layer (conv_layer.h).
#pragma once

#include "cpu/conv/banks.h"
#include "cpu/conv/maps.h"
#include "cpu/conv3x3/finish_gradient.h"
#include "cpu/conv3x3/pack.h"
#include "cpu/conv3x3/wgrad.h"
#include "cpu/conv_layer/conv_layer.h"
#include "cpu/pieces/pack.h"
#include "cpu/pieces/wgrad.h"
#include "cpu/window/pack.h"
#include "cpu/window/wgrad.h"

namespace wnfused::cpu::WNFUSED_ISA {

inline ConvEpilogue<float> layer_epilogue(const WindowMaps& maps) {
  ConvEpilogue<float> epilogue{};
  epilogue.operand = maps.target.own;
  epilogue.other = maps.residual.own;
  epilogue.bias = maps.bias;
  epilogue.activation = maps.activation;
  epilogue.factor = maps.slope;
  return epilogue;
}

// What the phases are made of, for maps that are copied pixel by pixel.
template <class Shape>
struct PlainMapParts {
  using G = Shape;
  static constexpr bool kTransposed = false;

  static bool finishes_with_sums(const G&) { return false; }

  static void read(const G&, const MapShape& shape, const ExternalMap& given, int64_t item, float* map) {
    read_map(shape, given, item, map);
  }
};

// The same for the stage's convolution.
struct WinogradParts : PlainMapParts<Geometry> {
  static int64_t row_floats(const G& geometry) { return geometry.row_floats(); }

  static void pack(const ConvForward<G>& job, int64_t block, const Bank& bank, float* norm, float* scratch) {
    with_level_taps(job.geometry, [&](auto taps) { pack_forward<taps>(job, 0, block, bank, norm, scratch); });
  }

  static void pack(const ConvBackward<G>& job, int64_t block, const Bank& bank, float* scratch) {
    with_level_taps(job.back,
                    [&](auto taps) { pack_backward<taps>(job, job.back, 0, block, 1.0f, bank, scratch); });
  }

  template <class Job>
  static void convolve(const Job& job, const G& geometry, int64_t item, const WindowMaps& maps, const float* bank,
                       float* scratch, LeftPanels& left) {
    ConvEpilogue<float> epilogue = layer_epilogue(maps);
    // A tensor that was just allocated is in no cache.
    epilogue.fresh = maps.target.is_in_place() && !geometry.weights_stay ? maps.target.own : nullptr;
    convolution_item<Ending::kLayer>(geometry, item, maps.source.own, false, job.scratch.zeros, bank, epilogue,
                                     {{}, {}, job.is_packed()}, scratch, *job.poisoned,
                                     finds_panel(geometry, item, left));
  }

  static bool finishes_with_sums(const G& geometry) { return geometry.wgrad_finishes; }

  static void weight_gradient(const ConvBackward<G>& job, int64_t item, float* scratch, LeftPanels& left) {
    const G& geometry = job.geometry;
    float* bias_gradient = job.scratch.bias_gradient[0];
    if (geometry.wgrad_finishes)
      return finished_gradient_item(geometry, item, job.x.own, job.dz.own, job.scratch.zeros, bias_gradient, left,
                                    scratch, [&](int64_t block, const float* bank) {
                                      finish_from(job, block, bank, scratch + geometry.gradient_panels_at());
                                    });
    weight_gradient_item<false, false>(geometry, item, job.x.own, job.dz.own, job.scratch.zeros,
                                       job.scratch.gradient[0], bias_gradient, left, scratch);
  }

  static void finish(const ConvBackward<G>& job, int64_t block, float* scratch) {
    finish_from(job, block, job.scratch.gradient[0] + job.geometry.gradient_offset(block), scratch);
  }

 private:
  static void finish_from(const ConvBackward<G>& job, int64_t block, const float* bank, float* scratch) {
    with_level_taps(job.geometry, [&](auto taps) {
      finish_gradient<taps>(job, 0, block, 1.0f, bank, job.scratch.bias_gradient[0], scratch);
    });
  }

  template <class Use>
  static void with_level_taps(const G& geometry, const Use& use) {
    if (geometry.level_taps == 1) use(std::integral_constant<int, 1>());
    else use(std::integral_constant<int, kMaxLevelTaps>());
  }
};

// The same for a convolution by pieces of its kernel.
struct PiecesParts : PlainMapParts<Pieces> {
  static int64_t row_floats(const G& geometry) { return geometry.direct.row_floats(); }

  static void pack(const ConvForward<G>& job, int64_t block, const Bank& bank, float* norm, float* scratch) {
    const G& geometry = job.geometry;
    const int64_t outputs = geometry.target.channels;
    Block scale[kLanes];
    splat_lanes(measure_scales(job, outputs, row_floats(geometry), 0, block, bank.bias, norm), scale);
    pack_window(geometry.direct, job.v, block, scale, scratch);
    transform(geometry, block, scratch, bank);
  }

  static void pack(const ConvBackward<G>& job, int64_t block, const Bank& bank, float* scratch) {
    const G& geometry = job.back;
    pack_transposed_window(job, geometry.direct, block, scratch);
    transform(geometry, block, scratch, bank);
  }

  template <class Job>
  static void convolve(const Job& job, const G& geometry, int64_t item, const WindowMaps& maps, const float* bank,
                       float* scratch, LeftPanels&) {
    with_piece_taps(geometry, [&](auto taps) {
      pieces_item<taps>(geometry, item, maps.source.own, job.scratch.zeros, bank, layer_epilogue(maps), scratch,
                        *job.poisoned);
    });
  }

  static void weight_gradient(const ConvBackward<G>& job, int64_t item, float* scratch, LeftPanels&) {
    with_piece_taps(job.geometry, [&](auto taps) {
      pieces_gradient_item<taps>(job.geometry, item, job.x.own, job.dz.own, job.scratch.zeros, job.scratch.gradient[0],
                                 job.scratch.bias_gradient[0], scratch);
    });
  }

  static void finish(const ConvBackward<G>& job, int64_t block, float* scratch) {
    const G& geometry = job.geometry;
    finish_window_gradient(job, geometry.direct, block, job.scratch.gradient[0] + geometry.gradient_offset(block, 0),
                           job.dbias, job.scratch.bias_gradient[0], scratch);
  }

 private:
  static void transform(const G& geometry, int64_t block, const float* direct, const Bank& bank) {
    with_piece_taps(geometry, [&](auto taps) {
      put_pieces<taps>(geometry, direct, bank.weights + block * geometry.block_floats());
    });
  }
};

// The same for a window, of a layer here and of a transposed one below.
struct WindowParts {
  using G = Window;

  static bool finishes_with_sums(const G&) { return false; }

  static void read(const G& window, const MapShape&, const ExternalMap& given, int64_t item, float* map) {
    read_source(window, given, item, map);
  }

  template <class Job>
  static void convolve(const Job& job, const G& window, int64_t item, const WindowMaps& maps, const float* bank,
                       float* scratch, LeftPanels&) {
    window_item(window, item, maps, job.scratch.zeros, bank, scratch, *job.poisoned);
  }
};

struct DirectParts : WindowParts {
  static constexpr bool kTransposed = false;
  static int64_t row_floats(const G& window) { return window.row_floats(); }

  static void pack(const ConvForward<G>& job, int64_t block, const Bank& bank, float* norm, float*) {
    const Window& window = job.geometry;
    Block scale[kLanes];
    splat_lanes(measure_scales(job, window.target.channels, row_floats(window), 0, block, bank.bias, norm), scale);
    pack_window(window, job.v, block, scale, bank.weights + block * window.block_floats());
  }

  static void pack(const ConvBackward<G>& job, int64_t block, const Bank& bank, float*) {
    pack_transposed_window(job, job.back, block, bank.weights + block * job.back.block_floats());
  }

  static void weight_gradient(const ConvBackward<G>& job, int64_t item, float* scratch, LeftPanels&) {
    window_gradient_item(job.geometry, item, job.x.own, job.dz.own, job.scratch.zeros, job.scratch.gradient[0],
                         job.scratch.bias_gradient[0], scratch, *job.poisoned);
  }

  static void finish(const ConvBackward<G>& job, int64_t block, float* scratch) {
    const float* bank = job.scratch.gradient[0] + block * job.geometry.block_floats();
    finish_window_gradient(job, job.geometry, block, bank, job.dbias, job.scratch.bias_gradient[0], scratch);
  }
};

struct TransposedParts : WindowParts {
  static constexpr bool kTransposed = true;
  static int64_t row_floats(const G& window) { return window.target.channels * window.planes; }

  static void pack(const ConvForward<G>& job, int64_t block, const Bank& bank, float*, float*) {
    const int64_t channel0 = block * kLanes;
    for (int64_t channel = channel0; channel < channel0 + kLanes; ++channel)
      bank.bias[channel] = channel < job.output.channels && job.bias.data ? read_bias(job, channel) : 0.0f;
    pack_transposed_window(job, job.geometry, block, bank.weights + block * job.geometry.block_floats());
  }

  static void pack(const ConvBackward<G>& job, int64_t block, const Bank& bank, float*) {
    pack_known_window(job, job.back, job.input.channels, block,
                      bank.weights + block * job.back.block_floats());
  }

  static void weight_gradient(const ConvBackward<G>& job, int64_t item, float* scratch, LeftPanels&) {
    window_gradient_item(job.back, item, job.dz.own, job.x.own, job.scratch.zeros, job.scratch.gradient[0],
                         job.scratch.bias_gradient[0], scratch, *job.poisoned);
  }

  // The bias belongs to the outputs, not to the rows.
  static void finish(const ConvBackward<G>& job, int64_t block, float* scratch) {
    const float* bank = job.scratch.gradient[0] + block * job.back.block_floats();
    finish_window_gradient(job, job.back, block, bank, {}, nullptr, scratch);
  }

 private:
  static float read_bias(const ConvForward<G>& job, int64_t channel) {
    return cpu::WNFUSED_ISA::read(job.bias, channel);
  }
};

template <class Parts>
void conv_layer_forward(const ConvForward<typename Parts::G>& job, Worker& worker) {
  const auto& geometry = job.geometry;
  float* scratch = job.scratch.worker + worker.index() * job.scratch.worker_stride;
  Banks banks(geometry, job.scratch, worker.index());
  const bool own = geometry.own_banks;
  const int64_t inputs = count_of(job.x.is_copied(), job.input.runs());
  const int64_t added = count_of(job.residual.is_copied(), job.output.runs());
  const int64_t packs = count_of(!own && !job.is_packed(), geometry.output_blocks);
  const int64_t rows = Parts::kTransposed ? job.input.channels : job.output.channels;
  const int64_t row_blocks = divide_up(rows, kLanes);
  const auto measure = [&](int64_t block) {
    measure_norms(job.v, rows, Parts::row_floats(geometry), 0, block, job.norm);
  };
  const auto pack_shared = [&](int64_t block) { Parts::pack(job, block, job.scratch.bank[0], job.norm, scratch); };
  const int64_t norms_first = count_of(Parts::kTransposed && job.norm && !job.is_packed(), row_blocks);
  worker.phase({inputs, added, Parts::kTransposed ? norms_first : packs}, [&](int64_t item) {
    if (item < inputs) return Parts::read(geometry, job.input, job.x.given, item, job.x.own);
    if ((item -= inputs) < added) return read_map(job.output, job.residual.given, item, job.residual.own);
    if constexpr (Parts::kTransposed) measure(item - added);
    else pack_shared(item - added);
  });
  if constexpr (Parts::kTransposed) worker.phase({packs}, pack_shared);

  // A worker that packs alone meets every row once, as does the only item of a group of rows.
  const bool once = worker.is_alone() || (geometry.weights_stay && geometry.conv_chunks == 1);
  float* packed_norm = once ? job.norm : nullptr;
  LeftPanels left;
  const bool measured = job.norm && !Parts::kTransposed && own && !packed_norm;
  const int64_t items = geometry.conv_items(), norms = count_of(measured, row_blocks);
  worker.phase({items, norms}, [&](int64_t item) {
    if (item >= items) return measure(item - items);
    const Bank& bank = banks.of(0, item, [&](int64_t block, const Bank& target) {
      Parts::pack(job, block, target, packed_norm, scratch + job.scratch.packing);
    });
    const WindowMaps maps{job.x, job.y, job.residual, bank.bias, job.activation, job.slope};
    Parts::convolve(job, geometry, item, maps, bank.weights, scratch, left);
  });
  worker.phase({count_of(job.y.is_copied(), job.output.runs())},
               [&](int64_t item) { write_map(job.output, job.y.own, item, job.y.given); });
}

inline void sum_pixels(const float* pixels, int64_t count, int64_t channels, float* sums) {
  for (int64_t k = 0; k < channels; k += kLanes) {
    Block sum = zero();
    for (int64_t t = 0; t < count; ++t) sum = sum + load(pixels + t * channels + k);
    store(sums + k, sum);
  }
}

// Item `item` of dz: dy where the activation was passed, else `slope` of it; and its sum over pixels. `scratch`:
// kMapPixels pixels.
template <class Parts>
void mask_item(const ConvBackward<typename Parts::G>& job, int64_t item, float* scratch) {
  const MapShape& map = job.output;
  const PixelRun run = map_run(map, item);
  const int64_t first = (run.image * map.height * map.width + run.begin) * map.padded_channels;
  const int64_t floats = (run.end - run.begin) * map.padded_channels;
  float* dz = job.dz.own + first;
  const float* dy = dz;
  if (job.dy.is_in_place()) dy = job.dy.own + first;
  else read_pixels(map, job.dy.given, run, dz);
  if (job.activation != Activation::kNone) {
    const float* y = scratch;
    if (job.y.is_in_place()) y = job.y.own + first;
    else read_pixels(map, job.y.given, run, scratch);
    const bool leaky = job.activation == Activation::kLeakyRelu;
    const Block slope = splat(job.slope);
    for (int64_t k = 0; k < floats; k += kLanes) {
      const Block activation = load(y + k), gradient = load(dy + k);
      store(dz + k, leaky ? leaky_mask(activation, gradient, slope) : relu_mask(activation, gradient));
    }
    dy = dz;
  }
  const int64_t channels = map.padded_channels;
  if (job.bias_sums) sum_pixels(dy, run.end - run.begin, channels, job.bias_sums + item * channels);
  if (job.dz.is_copied()) write_pixels(map, dy, run, job.dz.given);
}

template <class Parts>
void conv_layer_backward(const ConvBackward<typename Parts::G>& job, Worker& worker) {
  const auto &geometry = job.geometry, &back = job.back;
  float* scratch = job.scratch.worker + worker.index() * job.scratch.worker_stride;
  Banks banks(back, job.scratch, worker.index());
  const bool input = job.dx.given.data != nullptr;
  const int64_t masks = count_of(job.make_dz || job.sums_bias(), job.output.runs());
  const int64_t inputs = count_of(job.weight && job.x.is_copied(), job.input.runs());
  const int64_t packs = count_of(input && !back.own_banks, back.output_blocks);
  worker.phase({masks, inputs, packs}, [&](int64_t item) {
    if (item < masks) return mask_item<Parts>(job, item, scratch);
    if ((item -= masks) < inputs) return Parts::read(geometry, job.input, job.x.given, item, job.x.own);
    Parts::pack(job, item - inputs, job.scratch.bank[0], scratch);
  });

  const LayerMap none{};
  const WindowMaps maps{job.dz, job.dx, none, nullptr, Activation::kNone, 0.0f};
  const auto& products = job.products();
  const int64_t gradients = count_of(job.weight, products.wgrad_items());
  LeftPanels left;
  worker.phase({gradients, count_of(input, back.conv_items())}, [&](int64_t item) {
    if (item < gradients) return Parts::weight_gradient(job, item, scratch, left);
    item -= gradients;
    const Bank& bank = banks.of(0, item, [&](int64_t block, const Bank& target) {
      Parts::pack(job, block, target, scratch + job.scratch.packing);
    });
    Parts::convolve(job, back, item, maps, bank.weights, scratch, left);
  });

  const int64_t finished = count_of(job.weight && !Parts::finishes_with_sums(products), products.output_blocks);
  const int64_t sums = count_of(job.bias_sums, job.output.channel_blocks);
  worker.phase({finished, sums, count_of(job.dx.is_copied(), job.input.runs())}, [&](int64_t item) {
    if (item < finished) return Parts::finish(job, item, scratch);
    if ((item -= finished) < sums) return finish_bias(job.dbias, job.output, masks, job.bias_sums, item);
    write_map(job.input, job.dx.own, item - sums, job.dx.given);
  });
}

}  // namespace wnfused::cpu::WNFUSED_ISA

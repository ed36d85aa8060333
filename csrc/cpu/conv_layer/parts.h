// What the phases of a single convolution layer are made of (driver.h), by the methods for floats.
#pragma once

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

inline ConvEpilogue<float> layer_epilogue(const LayerMaps& maps) {
  ConvEpilogue<float> epilogue{};
  epilogue.operand = maps.target.own;
  epilogue.other = maps.residual.own;
  epilogue.bias = maps.bias;
  epilogue.activation = maps.activation;
  epilogue.factor = maps.slope;
  return epilogue;
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
template <class G>
void mask_item(const ConvBackward<G>& job, int64_t item, float* scratch) {
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

// What the phases of a layer in floats are made of, for maps that are copied pixel by pixel.
template <class Shape>
struct FloatParts {
  using G = Shape;
  using Left = LeftPanels;
  static constexpr bool kTransposed = false;

  static void begin() {}
  static void end() {}

  static bool finishes_with_sums(const G&) { return false; }

  static void read(const MapShape& shape, const LayerMap& map, int64_t item) {
    read_map(shape, map.given, item, map.own);
  }

  static void write(const MapShape& shape, const LayerMap& map, int64_t item) {
    write_map(shape, map.own, item, map.given);
  }

  template <class Job>
  static void read_input(const Job& job, int64_t item) {
    read(job.input, job.x, item);
  }

  static void mask(const ConvBackward<G>& job, int64_t item, float* scratch) { mask_item(job, item, scratch); }
};

// The same for the stage's convolution.
struct WinogradParts : FloatParts<Geometry> {
  static int64_t row_floats(const ConvForward<G>& job) { return job.geometry.row_floats(); }

  static void pack(const ConvForward<G>& job, int64_t block, const Bank& bank, float* norm, float* scratch) {
    with_level_taps(job.geometry, [&](auto taps) { pack_forward<taps>(job, 0, block, bank, norm, scratch); });
  }

  static void pack(const ConvBackward<G>& job, int64_t block, const Bank& bank, float* scratch) {
    with_level_taps(job.back,
                    [&](auto taps) { pack_backward<taps>(job, job.back, 0, block, 1.0f, bank, scratch); });
  }

  template <class Job>
  static void convolve(const Job& job, const G& geometry, int64_t item, const LayerMaps& maps, const float* bank,
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
struct PiecesParts : FloatParts<Pieces> {
  static int64_t row_floats(const ConvForward<G>& job) { return job.geometry.direct.row_floats(); }

  static void pack(const ConvForward<G>& job, int64_t block, const Bank& bank, float* norm, float* scratch) {
    const G& geometry = job.geometry;
    const int64_t outputs = geometry.target.channels;
    Block scale[kLanes];
    splat_lanes(measure_scales(job, outputs, row_floats(job), 0, block, bank.bias, norm), scale);
    pack_window(geometry.direct, job.v, block, scale, scratch);
    transform(geometry, block, scratch, bank);
  }

  static void pack(const ConvBackward<G>& job, int64_t block, const Bank& bank, float* scratch) {
    const G& geometry = job.back;
    pack_transposed_window(job, geometry.direct, block, scratch);
    transform(geometry, block, scratch, bank);
  }

  template <class Job>
  static void convolve(const Job& job, const G& geometry, int64_t item, const LayerMaps& maps, const float* bank,
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
struct WindowParts : FloatParts<Window> {
  template <class Job>
  static void read_input(const Job& job, int64_t item) {
    read_source(job.geometry, job.x.given, item, job.x.own);
  }

  template <class Job>
  static void convolve(const Job& job, const G& window, int64_t item, const LayerMaps& maps, const float* bank,
                       float* scratch, LeftPanels&) {
    window_item(window, item, maps, job.scratch.zeros, bank, scratch, *job.poisoned);
  }
};

struct DirectParts : WindowParts {
  static int64_t row_floats(const ConvForward<G>& job) { return job.geometry.row_floats(); }

  static void pack(const ConvForward<G>& job, int64_t block, const Bank& bank, float* norm, float*) {
    const Window& window = job.geometry;
    Block scale[kLanes];
    splat_lanes(measure_scales(job, window.target.channels, row_floats(job), 0, block, bank.bias, norm), scale);
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
  static int64_t row_floats(const ConvForward<G>& job) {
    return job.geometry.target.channels * job.geometry.planes;
  }

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

}  // namespace wnfused::cpu::WNFUSED_ISA

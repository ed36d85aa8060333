// A single convolution layer on kernels of this library: float32, zero padding, one to three spatial dims.
//
//   forward    read x | y = act(conv(x, w) + b + residual), norms | write y
//   backward   dz = act'(y) dy, read x | dW = x * dz, dx = conv'(dz, w) | dv, dg, db from dW, write dx
//
// '|' are phase boundaries. A map that has the kernels' own layout (stage.h), a channels_last tensor of a multiple of
// 16 channels, is read and written where it is; others are converted on the way in and out, but for channels_last ones
// of any number of channels that a window reads or writes.
//
//   Winograd   3x3, over three dims 3x3x3 or 1x3x3, that keep the size of maps which are not tiny: the stage's
//              convolution, `Geometry`
//   pieces     stride 1, three columns and more, or one: Winograd's method along the lines of the map, `Pieces`
//              (pieces.h)
//   direct     every other window: `Window` (window.h), or `Depthwise` (depthwise.h)
//
// A transposed convolution is the data gradient of another one: the same windows the other way round. Its rows of v
// belong to x's channels, so every norm comes before the first product.
//
// Banks, panels, slices and the order of sums are alike but for depthwise layers. A value that is not finite is left to
// the vendor's convolution (conv_routes.h).
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "depthwise.h"
#include "layer.h"
#include "pieces.h"
#include "stage.h"

namespace wnfused::cpu {

// How the kernels come at a map of the caller's: by a copy made before or after the products, where it is, or panel by
// panel as it is read or written.
enum class Access { kCopy, kInPlace, kPanels };

// A map of the caller's and, in the kernels' layout, the memory for it, if it has any.
struct LayerMap {
  ExternalMap given;  // data null: there is none
  float* own;
  Access access;
  bool dense;  // channels of a pixel, and then pixels, lie one after another, be they whole blocks or not

  bool is_in_place() const { return access == Access::kInPlace; }
  bool is_copied() const { return given.data && access == Access::kCopy; }
};

// Memory of the caller's for a forward's bank, of a layer whose weights do not change.
struct KeptBank {
  Bank bank;
  bool packed;  // by an earlier call of the same layer and method
};

// G: Geometry, Pieces, Window or Depthwise.
template <class G>
struct ConvForward {
  G geometry;              // from x's map to y's
  MapShape input, output;  // x's and y's
  LayerMap x, y, residual;
  Parameter v, g, bias;  // g's data null: w = v, and nothing of norms or dg is read or written
  float* norm;
  Activation activation;
  float slope;
  const KeptBank* kept;  // null: banks are packed for this call
  Scratch scratch;
  std::atomic<bool>* poisoned;
  static constexpr bool round_operands = false;

  bool is_packed() const { return kept && kept->packed; }
};

template <class G>
struct ConvBackward {
  G geometry, transposed;  // from x's map to y's; from y's map to x's
  MapShape input, output;  // x's and y's
  LayerMap x, y, dy, dz, dx;  // dz.own may be dy's memory
  bool make_dz, weight;       // weight: dv, dg and db are wanted
  bool is_transposed;
  Parameter v, g, bias;
  Parameter dv, dg, dbias;
  float* bias_sums;  // transposed: of the runs of y's pixels, in order
  const float* norm;
  Activation activation;
  float slope;
  Scratch scratch;
  std::atomic<bool>* poisoned;
  static constexpr bool round_operands = false;
  static constexpr bool is_packed() { return false; }

  // Whose weight gradient it is, and whether y's pixels are summed for the bias.
  const G& products() const { return is_transposed ? transposed : geometry; }
  bool sums_bias() const { return is_transposed && weight && dbias.data; }
};

template <class G>
struct ConvKernels {
  void (*forward)(const ConvForward<G>&, Worker&);
  void (*backward)(const ConvBackward<G>&, Worker&);
};

namespace avx512 {
extern const ConvKernels<Geometry> winograd_kernels;
extern const ConvKernels<Pieces> pieces_kernels;
extern const ConvKernels<Window> direct_kernels, transposed_kernels;
extern const ConvKernels<Depthwise> depthwise_kernels;
}
namespace avx2 {
extern const ConvKernels<Geometry> winograd_kernels;
extern const ConvKernels<Pieces> pieces_kernels;
extern const ConvKernels<Window> direct_kernels, transposed_kernels;
extern const ConvKernels<Depthwise> depthwise_kernels;
}
namespace portable {
extern const ConvKernels<Geometry> winograd_kernels;
extern const ConvKernels<Pieces> pieces_kernels;
extern const ConvKernels<Window> direct_kernels, transposed_kernels;
extern const ConvKernels<Depthwise> depthwise_kernels;
}

// Maps, x and those of the calls below, have lines at equal distances. shape: of a transposed layer, the convolution
// whose data gradient it is.
struct ConvLayer {
  ConvShape shape;
  bool transposed;
  Method method;
  const torch::stable::Tensor &x, &v;  // v: every row one run of memory, [C][taps] or channels_last [taps][C]; dv alike
  const float *gain, *bias;            // gain null: a plain convolution, w = v; bias may be null
  Activation activation;
  float slope;
  bool matrix = false;  // the maps are dense, a row a pixel of one line
};

// Fills y and, unless a kept bank is packed already, the norms. False if it met a value that is not finite: then nothing
// of it counts. kept: null, or a bank of kept_floats().
bool run_conv_layer(const ConvLayer& layer, const std::optional<torch::stable::Tensor>& residual,
                    const torch::stable::Tensor& y, float* norm, const KeptBank* kept = nullptr);

// Floats of a layer's bank and of the bias beside it, unless it is depthwise. They depend on v and on the method alone, and
// no two methods have the same number.
struct KeptFloats {
  int64_t weights, bias;

  int64_t sum() const { return weights + bias; }
};
KeptFloats kept_floats(const ConvLayer& layer);

// What is filled where it is there. dg and dbias have dv beside them.
struct ConvGradients {
  std::optional<torch::stable::Tensor> dx, dv, dz;
  float *dgain, *dbias;
};

// y is read where the layer has an activation.
bool run_conv_layer_backward(const ConvLayer& layer, const torch::stable::Tensor& dy, const torch::stable::Tensor& y,
                             const float* norm, const ConvGradients& gradients);

}  // namespace wnfused::cpu

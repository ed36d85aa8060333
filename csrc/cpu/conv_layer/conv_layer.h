// A single convolution layer on kernels of this library: zero padding, one to three spatial dims, float32, and bfloat16
// maps, which but for pairs are float32 in the kernels' own layout.
//
//   forward    read x | y = act(conv(x, w) + b + residual), norms | write y
//   backward   dz = act'(y) dy, read x | dW = x * dz, dx = conv'(dz, w) | dv, dg, db from dW, write dx
//
// '|' are phase boundaries. A map that has the kernels' own layout (memory.h), a channels_last tensor of a multiple of
// 16 channels, is read and written where it is; others are converted on the way in and out, but for channels_last ones
// of any number of channels that a window reads or writes.
//
//   Winograd   3x3, over three dims 3x3x3 or 1x3x3, that keep the size of maps which are not tiny: the stage's
//              convolution, `Geometry`
//   pieces     stride 1, three columns and more, or one: Winograd's method along the lines of the map, `Pieces`
//              (pieces.h)
//   direct     every other window: `Window` (window.h), or `Depthwise` (depthwise.h)
//   pairs      bfloat16 maps where there are products of pairs, any window of one level, no groups: `PairWindow`
//              (pair_layer.h)
//
// A transposed convolution is the data gradient of another one: the same windows the other way round. Its rows of v
// belong to x's channels, so every norm comes before the first product.
//
// Banks, panels, slices and the order of sums are alike but for depthwise layers. A value that is not finite is left to
// the vendor's convolution (conv_routes.h).
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "cpu/conv/layer_job.h"
#include "cpu/conv3x3/geometry.h"
#include "cpu/depthwise/depthwise.h"
#include "cpu/pieces/pieces.h"

namespace wnfused::cpu {

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

// Fills y and, unless a kept bank is packed already, the norms. False if it met a value that is not finite: then
// nothing of it counts. kept: null, or a bank of kept_floats().
bool run_conv_layer(const ConvLayer& layer, const std::optional<torch::stable::Tensor>& residual,
                    const torch::stable::Tensor& y, float* norm, const KeptBank* kept = nullptr);

// Floats of a layer's bank and of the bias beside it, unless it is depthwise. They depend on v and on the method alone.
struct KeptFloats {
  int64_t weights, bias;

  int64_t sum() const { return weights + bias; }
};
KeptFloats kept_floats(const ConvLayer& layer);

// The gradients to fill; those that are absent or null are left out. dg comes with dv only, and so does dbias from the
// kernels of this file.
struct ConvGradients {
  std::optional<torch::stable::Tensor> dx, dv, dz;
  float *dgain, *dbias;
};

// y is read where the layer has an activation.
bool run_conv_layer_backward(const ConvLayer& layer, const torch::stable::Tensor& dy, const torch::stable::Tensor& y,
                             const float* norm, const ConvGradients& gradients);

}  // namespace wnfused::cpu

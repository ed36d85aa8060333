// A single convolution layer on the stage's kernels: 3x3, stride 1, zero padding 1, one group, float32.
//
//   forward    read x | y = act(conv(x, w) + b + residual), norms | write y
//   backward   dz = act'(y) dy, read x | dW = x * dz, dx = conv'(dz, w) | dv, dg, db from dW, write dx
//
// '|' are phase boundaries. A map that has the kernels' own layout (stage.h), a channels_last tensor of a multiple of 16
// channels, is read and written where it is; others are converted on the way in and out.
//
// Methods, banks, panels, slices and the order of sums are those of a stage's convolution. A value that is not finite is
// left to the vendor's convolution (layer_conv.cpp).
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "layer.h"
#include "stage.h"

namespace wnfused::cpu {

// A map of the caller's and, in the kernels' layout, the memory for it; the same memory where it has that layout.
struct LayerMap {
  ExternalMap given;  // data null: there is none
  float* own;
  bool in_place;

  bool is_copied() const { return given.data && !in_place; }
};

struct Conv3x3Forward {
  Geometry geometry, transposed;  // x to y; y to x, whose `channels` are the outputs
  LayerMap x, y, residual;
  Parameter v, g, bias;
  bool round_operands;  // never
  float* norm;
  Activation activation;
  float slope;
  Scratch scratch;
  std::atomic<bool>* poisoned;
};

struct Conv3x3Backward {
  Geometry geometry, transposed;
  LayerMap x, y, dy, dz, dx;  // dz.own may be dy's memory
  bool make_dz, weight;       // weight: dv, dg and db are wanted
  Parameter v, g, bias;
  Parameter dv, dg, dbias;
  bool round_operands;
  const float* norm;
  Activation activation;
  float slope;
  Scratch scratch;
  std::atomic<bool>* poisoned;
};

struct Conv3x3Kernels {
  void (*forward)(const Conv3x3Forward&, Worker&);
  void (*backward)(const Conv3x3Backward&, Worker&);
};

namespace avx512 {
extern const Conv3x3Kernels conv3x3_kernels;
}
namespace avx2 {
extern const Conv3x3Kernels conv3x3_kernels;
}
namespace portable {
extern const Conv3x3Kernels conv3x3_kernels;
}

// How these kernels take a layer, where they are faster than the vendor's (bench/NOTES.md has the measurements).
std::optional<Method> conv3x3_method(int64_t images, int64_t inputs, int64_t outputs, int64_t height, int64_t width);

struct Conv3x3Layer {
  Method method;
  const torch::stable::Tensor &x, &v;  // v contiguous, or channels_last of a multiple of 16 channels; dv likewise
  const float *gain, *bias;            // bias may be null
  Activation activation;
  float slope;
};

// Fills y and the norms. False if it met a value that is not finite: then nothing of it counts.
bool run_conv3x3(const Conv3x3Layer& layer, const std::optional<torch::stable::Tensor>& residual,
                 const torch::stable::Tensor& y, float* norm);

// What is filled where it is there. dg and dbias have dv beside them.
struct Conv3x3Gradients {
  std::optional<torch::stable::Tensor> dx, dv, dz;
  float *dgain, *dbias;
};

// y is read where the layer has an activation.
bool run_conv3x3_backward(const Conv3x3Layer& layer, const torch::stable::Tensor& dy, const torch::stable::Tensor& y,
                          const float* norm, const Conv3x3Gradients& gradients);

}  // namespace wnfused::cpu

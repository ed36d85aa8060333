// A convolution by strips (strips.h), or a transposed one: the plans, the memory and the passes beside.
//
//                     y                dx               dw
//   convolution       x, strips_of     dz, strips_back  dz and x, strips_of
//   transposed        x, strips_back   dz, strips_of    x and dz, strips_of
#pragma once

#include <optional>

#include "cpu/conv_layer/conv_layer.h"
#include "cpu/layer/tensor.h"

namespace wnfused::cpu {

// In float32, v and the maps dense, contiguous or channels_last each (in_lines). shape: of a transposed layer, the
// convolution whose data gradient it is.
struct StripLayer {
  const ConvShape& shape;
  bool transposed;
  const Tensor &x, &v;
  const float *gain, *bias;  // gain null: v is the weight itself, without norms; bias may be null
  Activation activation;
  float slope;
};

// Fills y and the norms; the residual lies as y does. False if it met a weight that is not finite, or would need too
// much memory: then nothing of it counts.
bool run_strips(const StripLayer& layer, const std::optional<Tensor>& residual, const Tensor& y, float* norms);

// y is read where the layer has an activation, and lies as dy does. False, too, if a gradient of the weights is not
// finite.
bool run_strips_backward(const StripLayer& layer, const Tensor& dy, const Tensor& y, const float* norms,
                         const ConvGradients& gradients);

}  // namespace wnfused::cpu

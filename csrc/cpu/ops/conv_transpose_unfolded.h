// A transposed convolution on few pixels by the kernels of linear layers (unfolding.h). It is the data gradient of a
// convolution from y's map to x's, `shape`:
//
//   forward    Z = s x v, rows [x's pixels, channels x taps]
//              y = act(the sum of Z where windows overlap + b + residual)
//   backward   D = the windows of dz
//              dx = s (D v^T), dv and dg from D and x
#pragma once

#include <optional>

#include "cpu/ops/conv_call.h"
#include "cpu/ops/unfolding.h"

namespace wnfused::cpu {

// All in float32. Fills y and the norms. False if it met a value that is not finite: then nothing of it counts.
bool unfolded_conv_transpose(const ConvCall& call, const std::optional<Tensor>& residual, const Tensor& y,
                             float* norms);

// y is read where the layer has an activation.
bool unfolded_conv_transpose_backward(const ConvCall& call, const Tensor& dy, const Tensor& y, const float* norms,
                                      const ConvGradients& gradients);

}  // namespace wnfused::cpu

// Single layers on CUDA tensors; vendor.cpp has the story.
#pragma once

#include <ATen/ATen.h>

#include "activation_number.h"
#include "autograd/layer.h"
#include "needs.h"

namespace wnfused::vendor {

using at::IntArrayRef;
using at::Tensor;

struct Outputs {
  Tensor y, norm, w;  // w: the effective weight, in x's dtype; undefined where none was made
};

Outputs linear(
    const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias, const Optional& residual,
    int64_t activation, double slope);
Outputs conv(
    const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias, const Optional& residual,
    IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups, int64_t activation, double slope);

// known: the forward's w; without it, it is made again where it is read.
Gradients linear_backward(
    const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& v, const Tensor& g, const Tensor& norm,
    const Tensor& known, const Needs& needs, int64_t activation, double slope);
Gradients conv_backward(const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& v, const Tensor& g,
                        const Tensor& norm, const Tensor& known, const Needs& needs, IntArrayRef stride,
                        IntArrayRef padding, IntArrayRef dilation, int64_t groups, int64_t activation, double slope);

}  // namespace wnfused::vendor

// Layers as torch's own product with the effective weight, whose op has derivatives of every order and knows every
// transform: so they run in float64 on the CPU, which no kernel has, and under the transforms of torch.func, which none
// knows. All else is recorded as of a plain layer.
#pragma once

#include <ATen/ATen.h>

#include "autograd/layer_graph.h"

namespace wnfused::composed_layer {

using at::Tensor;
using layer_graph::Convolution;

// Whether this is how a layer runs; what goes along with x is checked where it runs.
bool takes(const Tensor& x);

Tensor linear(const LayerInputs& inputs, int64_t dim, int64_t activation, double slope);
Tensor conv(const LayerInputs& inputs, const Convolution& of, int64_t activation, double slope);

}  // namespace wnfused::composed_layer

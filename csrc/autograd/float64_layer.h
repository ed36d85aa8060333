// Layers in float64 on the CPU, where no kernel runs them: torch's own product with the effective weight, which is a
// node with derivatives of every order. All else is recorded as of a plain layer.
#pragma once

#include <ATen/ATen.h>

#include "autograd/layer_graph.h"

namespace wnfused::float64_layer {

using at::Tensor;
using layer_graph::Convolution;
using layer_graph::Optional;

// float64 on the CPU; what goes along is checked where it runs.
inline bool takes(const Tensor& x) { return x.is_cpu() && x.scalar_type() == at::kDouble; }

Tensor linear(
    const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias, const Optional& residual, int64_t dim,
    int64_t activation, double slope);

Tensor conv(
    const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias, const Optional& residual,
    const Convolution& of, int64_t activation, double slope);

}  // namespace wnfused::float64_layer

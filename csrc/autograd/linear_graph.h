// The gradients of a linear layer without an activation as a graph of torch's own ops, so that they can be
// differentiated again, and again: what an eikonal loss, a penalty on gradients or a differential equation asks for.
//
//   dx = dy w,   dw = dy^T x,   db = sum dy,      w = g v / ||v||_dim,   dv, dg from dw
//
// A derivative of any order is then products with w, as of an un-normalised layer, and one pass through the norm where
// it reaches v and g.
#pragma once

#include <ATen/ATen.h>

#include "autograd/vendor.h"
#include "needs.h"

namespace wnfused::linear_graph {

using at::Tensor;
using vendor::Gradients;
using vendor::Optional;

constexpr int64_t kWhole = -1;  // in the place of a dim of v: one norm for all of it

// float32 on the CPU, and nothing asked for but a graph; y: undefined without an activation.
bool takes(
    const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias,
    const Optional& residual);

Gradients gradients(
    const Tensor& dy, const Tensor& x, const Tensor& v, const Tensor& g, const Tensor& norm, const Needs& needs,
    int64_t dim);

}  // namespace wnfused::linear_graph

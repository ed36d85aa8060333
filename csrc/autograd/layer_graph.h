// The gradients of a layer as a graph of torch's own ops, so that they can be differentiated again, and again: what an
// eikonal loss, a differential equation or a product with the Hessian asks for.
//
//   dz = act'(y) dy,   dx = op^T(dz, w),   dw = dz x^T,   db = sum dz,      w = g v / ||v||_dim,   dv, dg from dw
//
// A derivative of any order is then products with w, as of an un-normalised layer, and one pass through the norm where
// it reaches v and g.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "activation_number.h"
#include "autograd/layer.h"
#include "needs.h"

namespace wnfused::layer_graph {

using at::IntArrayRef;
using at::Tensor;

// What a node has kept. y: undefined without an activation; w: that of an earlier graph, or undefined, and then that of
// this one.
struct Saved : LayerInputs {
  const Tensor &y, &norm;
  Tensor& w;
};

// output_padding: of a transposed layer.
struct Convolution {
  IntArrayRef stride, padding, dilation;
  std::optional<IntArrayRef> output_padding;
  int64_t groups;
};

// As torch reads it right: in groups it misreads some formats of x and of the weights.
Tensor readable(const Tensor& t, const Convolution& of);

std::vector<int64_t> output_padding_of(const Convolution& of);

// float32 on the CPU, and nothing asked for but a graph.
bool takes(const Tensor& dy, const Saved& saved);

// Whether torch's own convolution gives what it should, forward and backward.
bool can_compose(const Tensor& x, const Tensor& v, const Convolution& of);

Gradients linear(
    const Tensor& dy, const Saved& saved, const Needs& needs, int64_t dim, int64_t activation, double slope);

// Of what can be composed.
Gradients conv(
    const Tensor& dy, const Saved& saved, const Needs& needs, const Convolution& of, int64_t activation, double slope);

// The gradients by dy, v and g of (dx, dz), a convolution's gradients by its input and its residual, for the cotangents
// (c, e), one of which may be undefined.
std::tuple<Tensor, Tensor, Tensor> conv_input_gradient_backward(
    const Tensor& c, const Tensor& e, const Tensor& dy, const Tensor& y, const Tensor& v, const Tensor& g,
    const Tensor& norm, bool by_dy, bool by_v, const Convolution& of, int64_t activation, double slope);

// The gradient before the activation as torch has it, the mask read off y. A slope of 0 makes a ReLU.
Tensor masked(const Tensor& dy, const Tensor& y, int64_t activation, double slope);

}  // namespace wnfused::layer_graph

// The effective weight w_i = g_i v_i / ||v_i||, by the kernels of the row norm, with derivatives of every order, also
// under the transforms of torch.func, nested as they may be.
#pragma once

#include <ATen/ATen.h>

#include <tuple>

namespace wnfused::weight {

using at::Tensor;

constexpr int64_t kWhole = -1;  // in the place of a dim of v: one norm for all of it

// w of v and g.
Tensor of(const Tensor& v, const Tensor& g, int64_t dim);

// The same where w is one that an earlier graph of this layer has kept, or undefined: one node for all its graphs.
// Their gradients meet there, and go through the norm once.
Tensor shared(Tensor& w, const Tensor& v, const Tensor& g, int64_t dim);

// (dv, dg) for the gradient dw of w.
std::tuple<Tensor, Tensor> gradients(
    const Tensor& dw, const Tensor& v, const Tensor& g, const Tensor& norm, int64_t dim);

}  // namespace wnfused::weight

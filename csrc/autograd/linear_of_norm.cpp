// Linear layers of CPU tensors whose norm is another than that of rows: one for the whole weight, as networks for
// visual questions have it, or one a feature in. No kernel takes the scale along, so these are the row norm's kernel
// and torch's product, in C++ since for small layers the calls between them take longer than they do. float32 alone.
//
//   w = g v / ||v||_dim,   y = act(x w^T + b + z)
//   dz = act'(y) dy,   dx = dz w,   dw = dz^T x,   db = sum dz
#include <ATen/ATen.h>
#include <torch/library.h>

#include <limits>
#include <tuple>

#include "activation_number.h"
#include "autograd/layer.h"
#include "autograd/layer_graph.h"
#include "autograd/node.h"
#include "autograd/op.h"
#include "autograd/weight.h"
#include "needs.h"

namespace wnfused {
namespace {

using at::Tensor;
using enum Activation;
using weight::kWhole;

std::tuple<Tensor, Tensor> weight_of(const Tensor& v, const Tensor& g, int64_t dim) {
  using Signature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, int64_t);
  static const auto run = op<Signature>("wnfused_native::weight_norm");
  return run.call(v, g, dim);
}

bool is_float(const Tensor& t) { return t.is_cpu() && t.scalar_type() == at::kFloat; }

std::tuple<Tensor, Tensor> composed_linear(
    const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias, const Optional& residual, int64_t dim,
    int64_t activation, double slope) {
  const KernelsOnly guard;
  TORCH_CHECK(is_float(x) && is_float(v) && is_float(g), "linear: not all tensors are float32 on the CPU");
  TORCH_CHECK(v.dim() == 2 && (dim == kWhole || dim == 1), "linear: v must be a matrix, dim 1 or none");
  TORCH_CHECK(x.dim() > 0 && x.size(-1) == v.size(1), "linear: x must end in v's features in");
  const int64_t norms = dim == kWhole ? 1 : v.size(1);
  const bool fits = g.numel() == norms && (g.dim() < 2 || (g.dim() == 2 && g.size(0) == 1));
  TORCH_CHECK(fits, "linear: g must have an entry a norm");
  TORCH_CHECK(!bias || (is_float(*bias) && bias->dim() == 1 && bias->size(0) == v.size(0)),
              "linear: bias does not fit");
  TORCH_CHECK(slope >= 0 && slope <= std::numeric_limits<double>::max(), "linear: the slope must be finite, 0 or more");
  const auto [w, norm] = weight_of(v, g, dim);
  Tensor y = at::linear(x, w, bias);
  if (residual) {
    TORCH_CHECK(is_float(*residual) && residual->sizes() == y.sizes(), "linear: residual must be like y");
    y.add_(*residual);
  }
  if (activation == kRelu) y.relu_();
  if (activation == kLeakyRelu) at::leaky_relu_(y, slope);
  return {y, norm};
}

Gradients composed_linear_backward(
    const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& v, const Tensor& g, const Tensor& norm,
    int64_t needs, int64_t dim, int64_t activation, double slope) {
  using Signature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t);
  static const auto norm_backward = op<Signature>("wnfused_native::weight_norm_backward");
  const KernelsOnly guard;
  const Needs asked = Needs::of(needs);
  const Tensor dz = layer_graph::masked(dy, y, activation, slope);
  const Tensor rows = dz.reshape({dz.numel() / v.size(0), v.size(0)});
  Optional dx, dv, dg, dbias;
  if (asked.x) dx = at::mm(rows, std::get<0>(weight_of(v, g, dim))).view(x.sizes());
  if (asked.v) {
    const Tensor dw = at::mm(rows.t(), x.reshape({rows.size(0), v.size(1)}));
    std::tie(dv, dg) = norm_backward.call(dw, v, g, norm, dim);
  }
  if (asked.bias) dbias = rows.sum(0);
  return {dx, dv, dg, dbias, asked.residual && activation != kNone ? Optional(dz) : Optional()};
}

}  // namespace
}  // namespace wnfused

// The schemas stand in wnfused/backends/native_autograd.py.
TORCH_LIBRARY_IMPL(wnfused_autograd, CPU, library) {
  library.impl("composed_linear", wnfused::composed_linear);
  library.impl("composed_linear_backward", wnfused::composed_linear_backward);
}

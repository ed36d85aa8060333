#include "autograd/linear_graph.h"

#include <c10/core/DispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <tuple>
#include <vector>

#include "autograd/node.h"
#include "autograd/op.h"

namespace wnfused::linear_graph {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The mathematics of reference.weight_norm_backward, in ops that torch differentiates. A row whose norm is 0 has no
// gradient, of any order: it is ones before its norm is taken, as 0 * inf would be NaN behind a mask.
std::tuple<Tensor, Tensor> norm_gradients(
    const Tensor& dw_given, const Tensor& v_given, const Tensor& g, const Tensor& norm, int64_t dim) {
  const std::vector<int64_t> spans = dim == kWhole ? std::vector<int64_t>{0, 1} : std::vector<int64_t>{1 - dim};
  std::vector<int64_t> broadcast(2, 1);
  if (dim != kWhole) broadcast[dim] = v_given.size(dim);
  Tensor dw = dw_given, v = v_given, gain = g.reshape(broadcast);
  const Tensor zero = norm.reshape(broadcast) == 0;
  if (zero.any().item<bool>()) {
    const Tensor none = at::zeros({}, v.options());
    dw = at::where(zero, none, dw);
    v = at::where(zero, at::ones({}, v.options()), v);
    gain = at::where(zero, none, gain);
  }
  const Tensor length = v.square().sum(spans, /*keepdim=*/true).sqrt(), unit = v / length;
  const Tensor dgain = (dw * unit).sum(spans, /*keepdim=*/true);
  return {gain / length * (dw - unit * dgain), dgain.reshape(g.sizes())};
}

// w of v and g: the kernels of the row norm, and the mathematics above where a graph is asked for once more.
struct Weight : torch::autograd::Function<Weight> {
  static constexpr const char* kDim = "dim";

  static Tensor forward(AutogradContext* ctx, const Tensor& v, const Tensor& g, int64_t dim) {
    using Signature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, int64_t);
    static const auto run = op<Signature>("wnfused_native::weight_norm");
    const KernelsOnly guard;
    const auto [w, norm] = run.call(v, g, dim);
    ctx->save_for_backward({v, g, norm});
    ctx->saved_data[kDim] = dim;
    return w;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& outputs) {
    using Signature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t);
    static const auto run = op<Signature>("wnfused_native::weight_norm_backward");
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &dw = outputs[0], &v = saved[0], &g = saved[1], &norm = saved[2];
    const int64_t dim = ctx->saved_data[kDim].toInt();
    Tensor dv, dg;
    if (asks_for_graph(dw)) {
      std::tie(dv, dg) = norm_gradients(dw, v, g, norm, dim);
    } else {
      const KernelsOnly guard;
      std::tie(dv, dg) = run.call(dw, v, g, norm, dim);
    }
    return {ctx->needs_input_grad(0) ? dv : Tensor(), ctx->needs_input_grad(1) ? dg : Tensor(), Tensor()};
  }
};

bool is_plain(const Tensor& t) {
  const c10::DispatchKeySet watched{c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                    c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Batched};
  return t.is_cpu() && t.scalar_type() == at::kFloat && t.layout() == at::kStrided && !t.key_set().has_any(watched) &&
         !t._fw_grad(0).defined();
}

bool is_plain(const Optional& t) { return !t || is_plain(*t); }

// A matrix as it is: a view of it would be one more node, forward and backward.
Tensor as_matrix(const Tensor& t, int64_t rows, int64_t columns) {
  return t.dim() == 2 ? t : t.reshape({rows, columns});
}

}  // namespace

bool takes(
    const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias,
    const Optional& residual) {
  return at::GradMode::is_enabled() && !y.defined() && is_plain(dy) && is_plain(x) && is_plain(v) && is_plain(g) &&
         is_plain(bias) && is_plain(residual) && dy.numel() > 0 && v.numel() > 0;
}

Gradients gradients(
    const Tensor& dy, const Tensor& x, const Tensor& v, const Tensor& g, const Tensor& norm, const Needs& needs,
    int64_t dim) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const int64_t outputs = v.size(0), inputs = v.size(1), rows = dy.numel() / outputs;
  const Tensor dz = as_matrix(dy, rows, outputs);
  Optional dx, dv, dg, dbias;
  if (needs.x) {
    dx = at::mm(dz, Weight::apply(v, g, dim));
    if (x.dim() != 2) dx = dx->view(x.sizes());
  }
  if (needs.v) {
    std::tie(dv, dg) = norm_gradients(at::mm(dz.t(), as_matrix(x, rows, inputs)), v, g, norm, dim);
  }
  if (needs.bias) dbias = dz.sum(0);
  return {dx, dv, dg, dbias, needs.residual ? Optional(dy) : Optional()};
}

}  // namespace wnfused::linear_graph

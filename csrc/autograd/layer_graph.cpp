#include "autograd/layer_graph.h"

#include <c10/core/DispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <tuple>
#include <vector>

#include "autograd/node.h"
#include "autograd/op.h"
#include "autograd/zero_gradient.h"

namespace wnfused::layer_graph {
namespace {

using enum Activation;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A derivative casts nothing: it runs in what the forward ran in.
struct NoAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

// The mathematics of reference.weight_norm_backward, in ops that torch differentiates. A row whose norm is 0 has no
// gradient, of any order: it is ones before its norm is taken, as 0 * inf would be NaN behind a mask.
std::tuple<Tensor, Tensor> norm_gradients(
    const Tensor& dw_given, const Tensor& v_given, const Tensor& g, const Tensor& norm, int64_t dim) {
  std::vector<int64_t> spans, broadcast(v_given.dim(), 1);
  for (int64_t d = 0; d < v_given.dim(); ++d) {
    if (d != dim) spans.push_back(d);
  }
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

// dz = act'(y) dy, of any number of derivatives by dy. By y they are zeros: the activations are piecewise linear.
struct Mask : torch::autograd::Function<Mask> {
  static constexpr const char* kActivation = "activation";
  static constexpr const char* kSlope = "slope";

  static Tensor forward(
      AutogradContext* ctx, const Tensor& dy, const Tensor& y, int64_t activation, double slope) {
    ctx->save_for_backward({y});
    ctx->saved_data[kActivation] = activation;
    ctx->saved_data[kSlope] = slope;
    return masked(dy, y, activation, slope);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& outputs) {
    const Tensor y = ctx->get_saved_variables()[0];
    const int64_t activation = ctx->saved_data[kActivation].toInt();
    const double slope = ctx->saved_data[kSlope].toDouble();
    const auto run = asks_for_graph(outputs[0]) ? &of : &masked;
    const Tensor ddy = ctx->needs_input_grad(0) ? run(outputs[0], y, activation, slope) : Tensor();
    return {ddy, ctx->needs_input_grad(1) ? zero_gradient(1, y) : Tensor(), Tensor(), Tensor()};
  }

  static Tensor of(const Tensor& dy, const Tensor& y, int64_t activation, double slope) {
    return activation == kNone ? dy : apply(dy, y, activation, slope);
  }
};

bool is_plain(const Tensor& t) {
  const c10::DispatchKeySet watched{c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                    c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Batched};
  return t.is_cpu() && t.scalar_type() == at::kFloat && t.layout() == at::kStrided && !t.key_set().has_any(watched) &&
         !t._fw_grad(0).defined();
}

bool is_plain(const Optional& t) { return !t || is_plain(*t); }

// In groups torch misreads some formats of x and of the weights.
Tensor readable(const Tensor& t, const Convolution& of) { return of.groups > 1 ? t.contiguous() : t; }

std::vector<int64_t> output_padding_of(const Convolution& of) {
  return of.output_padding ? of.output_padding->vec() : std::vector<int64_t>(of.stride.size(), 0);
}

std::tuple<Tensor, Tensor> convolution_backward(
    const Tensor& dz, const Tensor& x, const Tensor& w, const Convolution& of, bool by_input, bool by_weight) {
  const auto [dx, dw, unused] = at::convolution_backward(
      dz, x, w, std::nullopt, of.stride, of.padding, of.dilation, of.output_padding.has_value(), output_padding_of(of),
      of.groups, {by_input, by_weight, false});
  return {dx, dw};
}

// A matrix as it is: a view of it would be one more node, forward and backward.
Tensor as_matrix(const Tensor& t, int64_t rows, int64_t columns) {
  return t.dim() == 2 ? t : t.reshape({rows, columns});
}

}  // namespace

bool takes(const Tensor& dy, const Saved& saved) {
  return at::GradMode::is_enabled() && is_plain(dy) && is_plain(saved.x) && is_plain(saved.v) && is_plain(saved.g) &&
         is_plain(saved.bias) && is_plain(saved.residual) && dy.numel() > 0 && saved.v.numel() > 0;
}

Tensor masked(const Tensor& dy, const Tensor& y, int64_t activation, double slope) {
  if (activation == kNone) return dy;
  if (activation == kRelu || slope == 0) return at::threshold_backward(dy, y, 0);
  return at::leaky_relu_backward(dy, y, slope, /*self_is_result=*/true);
}

Gradients linear(
    const Tensor& dy, const Saved& saved, const Needs& needs, int64_t dim, int64_t activation, double slope) {
  const NoAutocast guard;
  const Tensor &x = saved.x, &v = saved.v, &g = saved.g;
  const int64_t outputs = v.size(0), inputs = v.size(1), rows = dy.numel() / outputs;
  const Tensor dz = Mask::of(dy, saved.y, activation, slope), lines = as_matrix(dz, rows, outputs);
  Optional dx, dv, dg, dbias;
  if (needs.x) {
    dx = at::mm(lines, Weight::apply(v, g, dim));
    if (x.dim() != 2) dx = dx->view(x.sizes());
  }
  if (needs.v) {
    std::tie(dv, dg) = norm_gradients(at::mm(lines.t(), as_matrix(x, rows, inputs)), v, g, saved.norm, dim);
  }
  if (needs.bias) dbias = lines.sum(0);
  return {dx, dv, dg, dbias, needs.residual ? Optional(dz) : Optional()};
}

bool can_compose(const Tensor& x, const Tensor& v, const Convolution& of) {
  using Signature = std::tuple<bool, bool>(
      const Tensor&, const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, bool, IntArrayRef, int64_t);
  static const auto misleads = op<Signature>("wnfused_native::cpu_vendor_misleads");
  const auto [forward_is_wrong, backward_is_wrong] =
      misleads.call(readable(x, of).detach(), v.detach(), of.stride, of.padding, of.dilation,
                    of.output_padding.has_value(), output_padding_of(of), of.groups);
  return !forward_is_wrong && !backward_is_wrong;
}

Gradients conv(
    const Tensor& dy, const Saved& saved, const Needs& needs, const Convolution& of, int64_t activation, double slope) {
  const NoAutocast guard;
  const Tensor &v = saved.v, &g = saved.g, dz = Mask::of(dy, saved.y, activation, slope);
  Optional dx, dv, dg, dbias;
  if (needs.x || needs.v) {
    const auto [by_input, by_weight] = convolution_backward(
        dz, readable(saved.x, of), readable(Weight::apply(v, g, 0), of), of, needs.x, needs.v);
    if (needs.x) dx = by_input;
    if (needs.v) std::tie(dv, dg) = norm_gradients(by_weight, v, g, saved.norm, 0);
  }
  if (needs.bias) {
    std::vector<int64_t> pixels{0};
    for (int64_t d = 2; d < dz.dim(); ++d) pixels.push_back(d);
    dbias = dz.sum(pixels);
  }
  return {dx, dv, dg, dbias, needs.residual ? Optional(dz) : Optional()};
}

std::tuple<Tensor, Tensor, Tensor> conv_input_gradient_backward(
    const Tensor& c, const Tensor& e, const Tensor& dy, const Tensor& y, const Tensor& v, const Tensor& g,
    const Tensor& norm, bool by_dy, bool by_v, const Convolution& of, int64_t activation, double slope) {
  const NoAutocast guard;
  const Tensor w = readable(Weight::apply(v, g, 0), of);
  Tensor ddy, dv, dg;
  if (by_dy) {
    Tensor ddz = e;
    if (c.defined()) {
      const Tensor wc = at::convolution(readable(c, of), w, std::nullopt, of.stride, of.padding, of.dilation,
                                        of.output_padding.has_value(), output_padding_of(of), of.groups);
      ddz = e.defined() ? wc + e : wc;
    }
    ddy = Mask::of(ddz, y, activation, slope);
  }
  if (by_v && c.defined()) {
    const Tensor dz = Mask::of(dy, y, activation, slope);
    const Tensor dw = std::get<1>(convolution_backward(dz, readable(c, of), w, of, false, true));
    std::tie(dv, dg) = norm_gradients(dw, v, g, norm, 0);
  }
  return {ddy, dv, dg};
}

}  // namespace wnfused::layer_graph

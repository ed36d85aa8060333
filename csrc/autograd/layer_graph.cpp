#include "autograd/layer_graph.h"

#include <c10/core/DispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

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

// The rows of v that `dim` numbers: what they are summed over, and the shape of one number for each.
struct Rows {
  std::vector<int64_t> spans, numbers;

  Rows(const Tensor& v, int64_t dim) : numbers(v.dim(), 1) {
    for (int64_t d = 0; d < v.dim(); ++d) {
      if (d != dim) spans.push_back(d);
    }
    if (dim != kWhole) numbers[dim] = v.size(dim);
  }

  Tensor sum(const Tensor& t) const { return t.sum(spans, /*keepdim=*/true); }
  Tensor of(const Tensor& numbers_of_rows) const { return numbers_of_rows.reshape(numbers); }

  // 1 / ||v||, with a derivative by v. A row whose norm is 0 has none, of any order: it is ones before its norm is
  // taken, as 0 * inf would be NaN behind a mask.
  Tensor inverse_norm(const Tensor& v, const Tensor& norm) const {
    const Tensor zero = of(norm) == 0;
    if (!zero.any().item<bool>()) return sum(v.square()).rsqrt();
    const Tensor one = at::ones({}, v.options());
    return at::where(zero, at::zeros({}, v.options()), sum(at::where(zero, one, v).square()).rsqrt());
  }
};

// What reference.weight_norm_backward has, as a function with derivatives of its own:
//
//   u = v / r,  s = <dw, u>,       dg = s,   dv = g / r (dw - s u)            (r = ||v||)
//
// For the cotangents a of dv and b of dg, with p = <a, u> and A = g / r (a - p u), which is this very function of a,
//
//   by dw:  A + b u
//   by g:   c = (<a, dw> - p s) / r
//   by v:   (b dw - s A - p dv) / r - (g c + b s) / r u
struct NormGradients : torch::autograd::Function<NormGradients> {
  static constexpr const char* kDim = "dim";

  static variable_list forward(
      AutogradContext* ctx, const Tensor& dw, const Tensor& v, const Tensor& g, const Tensor& norm, int64_t dim) {
    const auto [dv, dg] = by_kernel(dw, v, g, norm, dim);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({dw, v, g, norm, dv, dg});
    ctx->saved_data[kDim] = dim;
    return {dv, dg};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& outputs) {
    const Tensor &a = outputs[0], &b_given = outputs[1];
    if (!a.defined() && !b_given.defined()) return variable_list(5);
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &dw = saved[0], &v = saved[1], &norm = saved[3], &dv = saved[4];
    const int64_t dim = ctx->saved_data[kDim].toInt();
    const bool graph = asks_for_graph(a.defined() ? a : b_given);
    const Rows rows(v, dim);
    const Tensor g = rows.of(saved[2]), s = rows.of(saved[5]), r = rows.of(norm);
    const Tensor inverse = graph ? rows.inverse_norm(v, norm) : at::where(r == 0, at::zeros_like(r), r.reciprocal());
    Tensor by_dw, by_g, by_v, of_v;  // of_v: what is to be multiplied with -v / r^2
    const auto add = [](Tensor& sum, const Tensor& part) { sum = sum.defined() ? sum + part : part; };
    if (a.defined()) {
      const auto [made, found] = graph ? of(a, v, saved[2], norm, dim) : by_kernel(a, v, saved[2], norm, dim);
      const Tensor p = rows.of(found);
      by_dw = made;
      by_g = (rows.sum(a * dw) - p * s) * inverse;
      by_v = (s * made + p * dv) * -inverse;
      of_v = g * by_g;
    }
    if (b_given.defined()) {
      const Tensor b = rows.of(b_given), share = b * inverse;
      add(by_dw, share * v);
      add(by_v, share * dw);
      add(of_v, b * s);
    }
    by_v = by_v - of_v * inverse.square() * v;
    return {by_dw, by_v, by_g.defined() ? by_g.reshape(saved[2].sizes()) : by_g, Tensor(), Tensor()};
  }

  static std::tuple<Tensor, Tensor> of(
      const Tensor& dw, const Tensor& v, const Tensor& g, const Tensor& norm, int64_t dim) {
    // Nodes like this one know neither batches nor tangents of forward mode.
    if (is_batch(dw) || dw._fw_grad(0).defined()) return composed(dw, v, g, norm, dim);
    const variable_list made = apply(dw, v, g, norm, dim);
    return {made[0], made[1]};
  }

  static std::tuple<Tensor, Tensor> by_kernel(
      const Tensor& dw, const Tensor& v, const Tensor& g, const Tensor& norm, int64_t dim) {
    using Signature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t);
    static const auto run = op<Signature>("wnfused_native::weight_norm_backward");
    const KernelsOnly guard;
    return run.call(dw, v, g, norm, dim);
  }

 private:
  static std::tuple<Tensor, Tensor> composed(
      const Tensor& dw, const Tensor& v, const Tensor& g, const Tensor& norm, int64_t dim) {
    const Rows rows(v, dim);
    const Tensor inverse = rows.inverse_norm(v, norm), unit = v * inverse, dg = rows.sum(dw * unit);
    return {rows.of(g) * inverse * (dw - unit * dg), dg.reshape(g.sizes())};
  }
};

// w of v and g, by the kernels of the row norm.
struct Weight : torch::autograd::Function<Weight> {
  static constexpr const char* kDim = "dim";
  static constexpr const char* kFreed = "freed";

  // One node for all the graphs that a layer is asked for: their gradients meet there, and go through the norm once. A
  // backward that keeps no graph frees it.
  static Tensor of(const Saved& saved, int64_t dim) {
    if (!saved.w.defined() || is_freed(saved.w)) saved.w = apply(saved.v, saved.g, dim);
    return saved.w;
  }

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
    const variable_list saved = ctx->get_saved_variables();
    if (!torch::autograd::get_current_graph_task_keep_graph()) ctx->saved_data[kFreed] = true;
    const auto run = asks_for_graph(outputs[0]) ? &NormGradients::of : &NormGradients::by_kernel;
    const auto [dv, dg] = run(outputs[0], saved[0], saved[1], saved[2], ctx->saved_data[kDim].toInt());
    return {ctx->needs_input_grad(0) ? dv : Tensor(), ctx->needs_input_grad(1) ? dg : Tensor(), Tensor()};
  }

 private:
  static bool is_freed(const Tensor& w) {
    const auto node = w.grad_fn();
    return node && static_cast<torch::autograd::CppNode<Weight>&>(*node).ctx_.saved_data.count(kFreed) != 0;
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
    if (activation == kNone) return dy;
    return dy._fw_grad(0).defined() ? masked(dy, y, activation, slope) : apply(dy, y, activation, slope);
  }
};

bool is_plain(const Tensor& t) {
  const c10::DispatchKeySet watched{c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                    c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Batched};
  return t.is_cpu() && t.scalar_type() == at::kFloat && t.layout() == at::kStrided && !t.key_set().has_any(watched) &&
         !t._fw_grad(0).defined();
}

bool is_plain(const Optional& t) { return !t || is_plain(*t); }

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

Tensor weight(const Tensor& v, const Tensor& g, int64_t dim) { return Weight::apply(v, g, dim); }

Tensor readable(const Tensor& t, const Convolution& of) { return of.groups > 1 ? t.contiguous() : t; }

std::vector<int64_t> output_padding_of(const Convolution& of) {
  return of.output_padding ? of.output_padding->vec() : std::vector<int64_t>(of.stride.size(), 0);
}

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
    dx = at::mm(lines, Weight::of(saved, dim));
    if (x.dim() != 2) dx = dx->view(x.sizes());
  }
  if (needs.v) {
    std::tie(dv, dg) = NormGradients::of(at::mm(lines.t(), as_matrix(x, rows, inputs)), v, g, saved.norm, dim);
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
        dz, readable(saved.x, of), readable(Weight::of(saved, 0), of), of, needs.x, needs.v);
    if (needs.x) dx = by_input;
    if (needs.v) std::tie(dv, dg) = NormGradients::of(by_weight, v, g, saved.norm, 0);
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
    std::tie(dv, dg) = NormGradients::of(dw, v, g, norm, 0);
  }
  return {ddy, dv, dg};
}

}  // namespace wnfused::layer_graph

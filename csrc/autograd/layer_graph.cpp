#include "autograd/layer_graph.h"

#include <c10/core/DispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <tuple>
#include <vector>

#include "autograd/node.h"
#include "autograd/op.h"
#include "autograd/weight.h"
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
    const bool records_itself = is_transformed() || dy._fw_grad(0).defined();  // torch's mask, which every level knows
    return records_itself ? masked(dy, y, activation, slope) : apply(dy, y, activation, slope);
  }
};

bool is_plain(const Tensor& t) {
  return t.is_cpu() && t.scalar_type() == at::kFloat && t.layout() == at::kStrided && !is_wrapped(t) &&
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

// Under a transform, where a tensor may be anything: a plain one of its shape, which has no entries. A batch cannot be
// asked for its format; what is not contiguous may be channels_last, and so may 1x1 weights, which are it by strides
// alone.
Tensor stand_in(const Tensor& t) {
  const auto like = c10::make_intrusive<c10::TensorImpl>(
      c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype(), c10::Device(c10::kCPU));
  like->set_sizes_contiguous(t.sizes());
  const bool is_dense = t.is_contiguous(), is_pointwise = t.dim() == 4 && t.size(2) == 1 && t.size(3) == 1;
  if (t.dim() == 4 && (is_pointwise || !is_dense)) like->empty_tensor_restride(at::MemoryFormat::ChannelsLast);
  if (t.dim() == 5 && !is_dense) like->empty_tensor_restride(at::MemoryFormat::ChannelsLast3d);
  return Tensor(like);
}

// A matrix as it is: a view of it would be one more node, forward and backward.
Tensor as_matrix(const Tensor& t, int64_t rows, int64_t columns) {
  return t.dim() == 2 ? t : t.reshape({rows, columns});
}

}  // namespace

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
    dx = at::mm(lines, weight::shared(saved.w, v, g, dim));
    if (x.dim() != 2) dx = dx->view(x.sizes());
  }
  if (needs.v) {
    std::tie(dv, dg) = weight::gradients(at::mm(lines.t(), as_matrix(x, rows, inputs)), v, g, saved.norm, dim);
  }
  if (needs.bias) dbias = lines.sum(0);
  return {dx, dv, dg, dbias, needs.residual ? Optional(dz) : Optional()};
}

bool can_compose(const Tensor& x_given, const Tensor& v_given, const Convolution& of) {
  const bool stands_for = is_transformed();
  const Tensor x = stands_for ? stand_in(x_given) : readable(x_given, of).detach();
  const Tensor v = stands_for ? stand_in(v_given) : v_given.detach();
  using Signature = std::tuple<bool, bool>(
      const Tensor&, const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, bool, IntArrayRef, int64_t);
  static const auto misleads = op<Signature>("wnfused_native::cpu_vendor_misleads");
  const auto [forward_is_wrong, backward_is_wrong] =
      misleads.call(x, v, of.stride, of.padding, of.dilation,
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
        dz, readable(saved.x, of), readable(weight::shared(saved.w, v, g, 0), of), of, needs.x, needs.v);
    if (needs.x) dx = by_input;
    if (needs.v) std::tie(dv, dg) = weight::gradients(by_weight, v, g, saved.norm, 0);
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
  const Tensor w = readable(weight::of(v, g, 0), of);
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
    std::tie(dv, dg) = weight::gradients(dw, v, g, norm, 0);
  }
  return {ddy, dv, dg};
}

}  // namespace wnfused::layer_graph

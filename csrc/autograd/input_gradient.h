// A convolution's gradient by its input, as a function that has a gradient of its own: what a penalty on gradients
// differentiates once more.
//
//   dx = op^T(dz, w),   dz = act'(y) dy
//
// is linear in dy and in w. With c the cotangent of dx, and e that of dz, the residual's gradient,
//
//   ddy = act'(y) (op(c, w) + e),      dv, dg: the layer's own backward with c in the place of x
//
// so both are the kernels of the layer once more, and a graph of torch's ops where derivatives of a third order are
// asked for. By y the derivative is zero: the activations are piecewise linear.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <tuple>

#include "autograd/kept.h"
#include "autograd/layer_graph.h"
#include "autograd/node.h"
#include "autograd/zero_gradient.h"

namespace wnfused {

// Run: what runs the layer, as in layers.cpp.
template <class Run, class... Constants>
struct InputGradient : torch::autograd::Function<InputGradient<Run, Constants...>> {
  using Tensor = at::Tensor;
  using Context = torch::autograd::AutogradContext;
  using Variables = torch::autograd::variable_list;

  static constexpr size_t kConstants = sizeof...(Constants);
  static constexpr size_t kInputs = 7;
  static constexpr const char* kKept = "constants";

  // dx and, where it is wanted, dz. y: none without an activation; then dz is dy, and nobody wants it.
  static Variables forward(
      Context* ctx, const Tensor& dy, const Tensor& v, const Tensor& g, const Optional& y, const Tensor& x,
      const Tensor& norm, bool dz_too, Constants... constants) {
    const KernelsOnly guard;
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({dy, v, g, y.value_or(Tensor()), norm});
    ctx->saved_data[kKept] = keep(constants...);
    const Needs needs{true, false, false, dz_too};
    const auto found = Run::backward(dy, y.value_or(dy), x, v, g, norm, needs.bits(), constants...);
    Variables made{std::get<0>(found).value()};
    if (dz_too) made.push_back(std::get<4>(found).value());
    return made;
  }

  static Variables backward(Context* ctx, const Variables& outputs) {
    Variables found(kInputs + kConstants);
    const Tensor c = outputs[0], e = outputs.size() > 1 ? outputs[1] : Tensor();
    if (!c.defined() && !e.defined()) return found;
    const Variables saved = ctx->get_saved_variables();
    const Tensor &dy = saved[0], &v = saved[1], &g = saved[2], &y = saved[3], &norm = saved[4];
    const bool by_dy = ctx->needs_input_grad(0), by_v = ctx->needs_input_grad(1), by_g = ctx->needs_input_grad(2);
    const auto constants = constants_of<Constants...>(ctx->saved_data[kKept]);
    const auto [ddy, dv, dg] = std::apply(
        [&](const auto&... of) {
          const auto run = asks_for_graph(c.defined() ? c : e) ? &by_graph : &by_kernels;
          return run(c, e, dy, y, v, g, norm, by_dy, by_v || by_g, of...);
        },
        constants);
    found[0] = ddy;
    if (by_v) found[1] = dv;
    if (by_g) found[2] = dg;
    if (y.defined() && ctx->needs_input_grad(3)) found[3] = zero_gradient(3, y);
    return found;
  }

 private:
  using Found = std::tuple<Tensor, Tensor, Tensor>;

  static Found by_graph(
      const Tensor& c, const Tensor& e, const Tensor& dy, const Tensor& y, const Tensor& v, const Tensor& g,
      const Tensor& norm, bool by_dy, bool by_v, Constants... constants) {
    const std::tuple<Constants...> all(constants...);
    return layer_graph::conv_input_gradient_backward(
        c, e, dy, y, v, g, norm, by_dy, by_v, Run::convolution(constants...), activation_of(all), slope_of(all));
  }

  static Found by_kernels(
      const Tensor& c, const Tensor& e, const Tensor& dy, const Tensor& y, const Tensor& v, const Tensor& g,
      const Tensor& norm, bool by_dy, bool by_v, Constants... constants) {
    const KernelsOnly guard;
    std::tuple<Constants...> all(constants...);
    const int64_t activation = activation_of(all);
    Tensor ddy, dv, dg;
    if (by_v && c.defined()) {
      const Needs needs{false, true, false, false};
      const auto found = Run::backward(dy, y.defined() ? y : dy, c, v, g, norm, needs.bits(), constants...);
      dv = std::get<1>(found).value();
      dg = std::get<2>(found).value();
    }
    if (by_dy) {
      activation_of(all) = static_cast<int64_t>(Activation::kNone);
      const Optional added = e.defined() ? Optional(e) : std::nullopt;
      const Optional no_bias;
      const auto linear = [&](Constants... of) {
        return std::get<0>(Run::forward({c, v, g, no_bias, added}, of...));
      };
      const Tensor ddz = c.defined() ? std::apply(linear, all) : e;
      ddy = layer_graph::masked(ddz, y, activation, slope_of(all));
    }
    return {ddy, dv, dg};
  }
};

// The gradients of a layer where they are wanted by its input and maybe by its residual alone.
template <class Run, class... Constants>
Gradients input_gradient(
    const at::Tensor& dy, const layer_graph::Saved& saved, bool by_residual, Constants... constants) {
  const Optional y = saved.y.defined() ? Optional(saved.y) : std::nullopt;
  const bool dz_too = by_residual && y;
  const auto made = InputGradient<Run, Constants...>::apply(
      dy, saved.v, saved.g, y, saved.x.detach(), saved.norm, dz_too, constants...);
  const Optional dz = by_residual ? Optional(dz_too ? made[1] : dy) : std::nullopt;
  return {made[0], std::nullopt, std::nullopt, std::nullopt, dz};
}

}  // namespace wnfused

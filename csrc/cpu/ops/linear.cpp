// linear: y = act(s (x v^T) + b + residual), x [M, K], v [N, K], and its gradients, by the route that suits the shape
// (linear_routes.h).
#include <torch/csrc/stable/library.h>

#include "cpu/layer/checks.h"
#include "cpu/layer/formats.h"
#include "cpu/layer/gains.h"
#include "cpu/ops/linear_routes.h"
#include "needs.h"
#include "ops.h"

namespace wnfused {
namespace {

using namespace cpu;

LinearShape shape_of(const Tensor& x, const Tensor& v) {
  STD_TORCH_CHECK(v.dim() == 2 && x.dim() > 0 && x.size(-1) == v.size(1), "linear: x must end in v's in_features");
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return {rows, v.size(1), v.size(0)};
}

void check_output(const Tensor& t, const char* name, const LinearShape& shape, const Tensor& x) {
  bool fits = t.scalar_type() == x.scalar_type() && t.dim() == x.dim() && t.size(-1) == shape.features;
  for (int64_t d = 0; fits && d + 1 < x.dim(); ++d) fits = t.size(d) == x.size(d);
  STD_TORCH_CHECK(fits, "linear: ", name, " must have the dtype of x and the shape of the output");
}

}  // namespace

std::tuple<Tensor, Tensor> linear(
    const Tensor& x, const Tensor& v, const Tensor& g, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual, int64_t activation, double slope) {
  check_parameters(x, v, g, bias);
  check_activation(activation, slope);
  const LinearShape shape = shape_of(x, v);
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = shape.features;
  const Tensor y = empty(sizes, x.scalar_type());
  check_residual(residual, y);
  const Tensor norm = empty({shape.features}, ScalarType::Float);
  std::vector<float> held_gain, held_bias;
  LinearCall call{shape, as_contiguous(x), as_contiguous(v), floats_of(g, held_gain),
                  bias ? floats_of(*bias, held_bias) : nullptr, std::nullopt, static_cast<Activation>(activation),
                  static_cast<float>(slope), y, static_cast<float*>(norm.mutable_data_ptr())};
  if (residual) call.residual = as_contiguous(*residual);
  run_linear(call);
  return {y, norm};
}

std::tuple<Gradient, Gradient, Gradient, Gradient, Gradient> linear_backward(
    const Tensor& dy_given, const Tensor& y_given, const Tensor& x, const Tensor& v, const Tensor& g,
    const Tensor& norm, int64_t needs_given, int64_t activation_given, double slope_given) {
  const Needs needs = Needs::of(needs_given);
  check_parameters(x, v, g, std::nullopt);
  check_activation(activation_given, slope_given);
  const Activation activation = static_cast<Activation>(activation_given);
  const float slope = static_cast<float>(slope_given);
  const LinearShape shape = shape_of(x, v);
  const bool masked = activation != Activation::kNone;
  check_output(dy_given, "dy", shape, x);
  if (masked) check_output(y_given, "y", shape, x);
  check_norm(norm, shape.features);
  const Tensor dy = as_contiguous(dy_given), y = masked ? as_contiguous(y_given) : dy;
  std::vector<float> held;
  LinearGradient call{shape, as_contiguous(x), as_contiguous(v), floats_of(g, held), entries<float>(norm),
                      std::nullopt, std::nullopt, nullptr};
  std::optional<Rounded> bias_gradient, gain_gradient;
  float* dbias = nullptr;
  if (needs.bias) dbias = bias_gradient.emplace(std::vector<int64_t>{shape.features}, v.scalar_type()).data();
  if (needs.x) call.dx = empty_as(call.x);
  if (needs.v) {
    call.dv = empty_as(call.v);
    call.dgain = gain_gradient.emplace(sizes_of(g), g.scalar_type()).data();
  }
  const Gradient dz = run_linear_backward(call, dy, y, activation, slope, needs.residual, dbias);
  return {call.dx, call.dv, needs.v ? Gradient(gain_gradient->tensor()) : Gradient(),
          needs.bias ? Gradient(bias_gradient->tensor()) : Gradient(), dz};
}

}  // namespace wnfused

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CPU, library) {
  library.impl("linear", TORCH_BOX(&wnfused::linear));
  library.impl("linear_backward", TORCH_BOX(&wnfused::linear_backward));
}

// conv: y = act(s conv(x, v) + b + residual) over 1 to 3 spatial dims, and its gradients, by the way that is chosen for
// the layer (choice.h).
#include <torch/csrc/stable/library.h>

#include "cpu/layer/checks.h"
#include "cpu/layer/formats.h"
#include "cpu/layer/gains.h"
#include "cpu/ops/conv_routes.h"
#include "ops.h"

namespace wnfused {

using namespace cpu;

namespace {

// Nothing where the vendor is asked.
std::optional<Tensor> forward_by(const ConvChoice& choice, const ConvCall& call, const std::optional<Tensor>& residual,
                                 float* norms, KeptBanks* banks) {
  switch (choice.way) {
    case ConvWay::kPlanes: return planes_conv(call, residual, norms);
    case ConvWay::kStrips: return strips_conv(call, residual, norms);
    case ConvWay::kUnfolded: return unfolded_conv(call, residual, norms);
    case ConvWay::kOwn: return own_conv(call, choice.method, residual, norms, choice.keeps ? banks : nullptr);
    case ConvWay::kVendor: break;
  }
  return std::nullopt;
}

std::optional<LayerGradients> backward_by(const ConvChoice& choice, const ConvCall& call, const Tensor& dy,
                                          const Tensor& y, const float* norms, const Needs& needs, float* dgain) {
  switch (choice.way) {
    case ConvWay::kPlanes: return planes_conv_backward(call, dy, y, norms, needs, dgain);
    case ConvWay::kStrips: return strips_conv_backward(call, dy, y, norms, needs, dgain);
    case ConvWay::kUnfolded: return unfolded_conv_backward(call, dy, y, norms, needs, dgain);
    case ConvWay::kOwn: return own_conv_backward(call, choice.method, dy, y, norms, needs, dgain);
    case ConvWay::kVendor: break;
  }
  return std::nullopt;
}

// y and the norms.
std::tuple<Tensor, Tensor> forward(
    const Tensor& x, const Tensor& v_given, const Tensor& g, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual, const Sliding& window, int64_t activation, double slope, KeptBanks* banks) {
  check_parameters(x, v_given, g, bias);
  check_activation(activation, slope);
  const Tensor v = has_dense_rows(v_given) ? v_given : torch::stable::contiguous(v_given);
  check_window(x, v, window);
  Tensor norm = empty({v.size(0)}, ScalarType::Float);
  float* norms = static_cast<float*>(norm.mutable_data_ptr());
  std::vector<float> held_gain, held_bias;
  const ConvCall call{conv_shape(x, v, window), x, v, floats_of(g, held_gain),
                      bias ? floats_of(*bias, held_bias) : nullptr, window, static_cast<Activation>(activation),
                      static_cast<float>(slope)};
  const ConvChoice choice = choose_forward(
      traits_of(call), {activation != Activation::kNone || residual, banks != nullptr});
  const std::optional<Tensor> y = forward_by(choice, call, residual, norms, banks);
  return {y ? *y : vendor_conv(call, bias, residual, norms), norm};
}

}  // namespace

std::tuple<Tensor, Tensor> conv(
    const Tensor& x, const Tensor& v, const Tensor& g, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual, const Extents& stride, const Extents& padding, const Extents& dilation,
    int64_t groups, int64_t activation, double slope) {
  return forward(x, v, g, bias, residual, {stride, padding, dilation, groups}, activation, slope, nullptr);
}

std::tuple<Tensor, Gradient> kept_conv(
    const Tensor& x, const Tensor& v, const Tensor& g, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual, const std::vector<Tensor>& known, const Extents& stride,
    const Extents& padding, const Extents& dilation, int64_t groups, int64_t activation, double slope) {
  KeptBanks banks{known, {}};
  const Tensor y =
      std::get<0>(forward(x, v, g, bias, residual, {stride, padding, dilation, groups}, activation, slope, &banks));
  return {y, banks.added};
}

std::tuple<Gradient, Gradient, Gradient, Gradient, Gradient> conv_backward(
    const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& v_given, const Tensor& g, const Tensor& norm,
    int64_t needs_given, const Extents& stride, const Extents& padding, const Extents& dilation, int64_t groups,
    int64_t activation, double slope) {
  check_parameters(x, v_given, g, std::nullopt);
  check_activation(activation, slope);
  const Tensor v = has_dense_rows(v_given) ? v_given : torch::stable::contiguous(v_given);
  const Sliding window{stride, padding, dilation, groups};
  check_window(x, v, window);
  check_output(dy, "dy", x, v, window);
  if (activation != Activation::kNone) check_output(y, "y", x, v, window);
  check_norm(norm, v.size(0));
  std::vector<float> held;
  const ConvCall call{conv_shape(x, v, window), x, v, floats_of(g, held), nullptr, window,
                      static_cast<Activation>(activation), static_cast<float>(slope)};
  const float* norms = entries<float>(norm);
  const Needs needs = Needs::of(needs_given);
  std::optional<Rounded> gain_gradient;
  float* dgain = needs.v ? gain_gradient.emplace(sizes_of(g), g.scalar_type()).data() : nullptr;
  const ConvChoice choice = choose_backward(traits_of(call), needs);
  std::optional<LayerGradients> made = backward_by(choice, call, dy, y, norms, needs, dgain);
  if (!made) made = vendor_conv_backward(call, dy, y, norms, needs, dgain);
  return {made->dx, made->dv, needs.v ? Gradient(gain_gradient->tensor()) : Gradient(), made->dbias, made->dz};
}

}  // namespace wnfused

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CPU, library) {
  library.impl("conv", TORCH_BOX(&wnfused::conv));
  library.impl("kept_conv", TORCH_BOX(&wnfused::kept_conv));
  library.impl("conv_backward", TORCH_BOX(&wnfused::conv_backward));
}

// Convolution layers by strips (strip_layer.h).
#include "cpu/layer/checks.h"
#include "cpu/layer/formats.h"
#include "cpu/ops/conv_gradients.h"
#include "cpu/ops/conv_routes.h"
#include "cpu/ops/strip_layer.h"

namespace wnfused::cpu {
namespace {

// A layer of single pixels goes through its levels as through rows.
ConvShape shape_of_strips(const ConvCall& conv) {
  return conv.shape.is_pointwise() ? conv.shape.without_levels() : conv.shape;
}

}  // namespace

std::optional<Tensor> strips_conv(const ConvCall& conv, const std::optional<Tensor>& residual, float* norms) {
  const Tensor x = in_lines(conv.x), y = empty_output(conv, ScalarType::Float);
  check_residual(residual, y);
  const std::optional<Tensor> added = residual ? std::optional(laid_out_as(*residual, y)) : std::nullopt;
  const StripLayer layer{shape_of_strips(conv), false, x, conv.v, conv.gain, conv.bias, conv.activation, conv.slope};
  return run_strips(layer, added, y, norms) ? std::optional(y) : std::nullopt;
}

std::optional<LayerGradients> strips_conv_backward(const ConvCall& conv, const Tensor& dy_given, const Tensor& y_given,
                                                   const float* norms, const Needs& needs, float* dgain) {
  const bool masked = conv.activation != Activation::kNone;
  const Tensor y = in_lines(masked ? y_given : dy_given), dy = masked ? laid_out_as(dy_given, y) : y;
  const Tensor x = in_lines(conv.x);
  const LayerGradients made = empty_gradients(conv, conv.v, dy, needs);
  const StripLayer layer{shape_of_strips(conv), false, x, conv.v, conv.gain, nullptr, conv.activation, conv.slope};
  return run_strips_backward(layer, dy, y, norms, to_fill(made, dgain)) ? std::optional(made) : std::nullopt;
}

}  // namespace wnfused::cpu

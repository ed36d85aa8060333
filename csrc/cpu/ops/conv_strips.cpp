// Convolution layers by strips (strip_layer.h), or nothing where another way is faster.
#include "cpu/layer/checks.h"
#include "cpu/layer/formats.h"
#include "cpu/ops/conv_gradients.h"
#include "cpu/ops/conv_routes.h"
#include "cpu/ops/strip_layer.h"

namespace wnfused::cpu {
namespace {

std::optional<ConvShape> open_shape(const ConvCall& conv) {
  const std::optional<ConvShape> shape = conv_shape(conv.x, conv.v, conv.at);
  if (!shape || !conv.gain) return std::nullopt;
  const bool floats = conv.x.scalar_type() == ScalarType::Float && conv.v.scalar_type() == ScalarType::Float;
  return floats && suits_strips(*shape, false, gives_channels_last(conv)) ? shape : std::nullopt;
}

std::optional<ConvShape> open_forward_shape(const ConvCall& conv) {
  const std::optional<ConvShape> shape = open_shape(conv);
  return shape && is_vendors_forward(*shape, gives_channels_last(conv)) ? std::nullopt : shape;
}

}  // namespace

bool strips_outdo_banks(const ConvCall& conv) { return open_forward_shape(conv).has_value(); }

std::optional<Tensor> strips_conv(const ConvCall& conv, const std::optional<Tensor>& residual, float* norms) {
  const std::optional<ConvShape> shape = open_forward_shape(conv);
  if (!shape) return std::nullopt;
  const Tensor x = in_lines(conv.x);
  const Tensor y = empty_map(map_sizes(shape->images, shape->outputs, shape->output_size(), conv.v.dim()),
                             gives_channels_last(conv), ScalarType::Float);
  check_residual(residual, y);
  const std::optional<Tensor> added = residual ? std::optional(laid_out_as(*residual, y)) : std::nullopt;
  const StripLayer layer{*shape, false, x, conv.v, conv.gain, conv.bias, conv.activation, conv.slope};
  return run_strips(layer, added, y, norms) ? std::optional(y) : std::nullopt;
}

std::optional<LayerGradients> strips_conv_backward(const ConvCall& conv, const Tensor& dy_given, const Tensor& y_given,
                                                   const float* norms, const ConvNeeds& needs, float* dgain) {
  const std::optional<ConvShape> shape = needs.x || needs.v ? open_shape(conv) : std::nullopt;
  if (!shape || is_vendors_backward(*shape, gives_channels_last(conv), needs.x)) return std::nullopt;
  const bool masked = conv.activation != Activation::kNone;
  const Tensor y = in_lines(masked ? y_given : dy_given), dy = masked ? laid_out_as(dy_given, y) : y;
  const Tensor x = in_lines(conv.x);
  const LayerGradients made = empty_gradients(conv, conv.v, dy, needs);
  const StripLayer layer{*shape, false, x, conv.v, conv.gain, nullptr, conv.activation, conv.slope};
  return run_strips_backward(layer, dy, y, norms, to_fill(made, dgain)) ? std::optional(made) : std::nullopt;
}

}  // namespace wnfused::cpu

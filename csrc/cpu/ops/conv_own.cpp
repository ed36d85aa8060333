// Convolution layers on the kernels of conv_layer.h.
#include "cpu/layer/checks.h"
#include "cpu/ops/conv_gradients.h"
#include "cpu/ops/conv_routes.h"

namespace wnfused::cpu {
namespace {

// v in floats, but for pairs, which read it as it is, and in an order of rows that the method knows: the stage's
// Winograd is particular.
Tensor rows_for(const ConvCall& conv, Method method) {
  const Tensor& v = conv.v;
  if (method == Method::kPairs) return v;
  const bool flat = v.dim() < 5 && (v.size(1) % kLanes == 0 || conv.shape.groups > 1);
  const bool any = method == Method::kDirect || method == Method::kPieces;
  const bool known = v.is_contiguous() || flat || any;
  return as_dtype(known ? v : torch::stable::contiguous(v), ScalarType::Float);
}

}  // namespace

std::optional<Tensor> own_conv(const ConvCall& conv, Method method, const std::optional<Tensor>& residual, float* norms,
                               KeptBanks* banks) {
  const Tensor y = empty_output(conv, conv.x.scalar_type());
  const Tensor rows = rows_for(conv, method), lines = with_even_lines(conv.x);
  check_residual(residual, y);
  const std::optional<Tensor> added = residual ? std::optional(with_even_lines(*residual)) : std::nullopt;
  const ConvLayer layer{conv.shape, false, method, lines, rows, conv.gain, conv.bias, conv.activation, conv.slope};
  return run_kept_layer(layer, added, y, norms, banks) ? std::optional(y) : std::nullopt;
}

std::optional<LayerGradients> own_conv_backward(const ConvCall& conv, Method method, const Tensor& dy, const Tensor& y,
                                                const float* norms, const Needs& needs, float* dgain) {
  const Tensor rows = rows_for(conv, method), lines = with_even_lines(conv.x);
  const ConvLayer layer{conv.shape, false, method, lines, rows, conv.gain, nullptr, conv.activation, conv.slope};
  const LayerGradients made = empty_gradients(conv, rows, y, needs);
  const Tensor signs = conv.activation == Activation::kNone ? dy : with_even_lines(y);
  if (!run_conv_layer_backward(layer, with_even_lines(dy), signs, norms, to_fill(made, dgain))) return std::nullopt;
  return in_format_of(conv.v, made);
}

}  // namespace wnfused::cpu

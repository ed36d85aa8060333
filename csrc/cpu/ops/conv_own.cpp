// Convolution layers on the kernels of conv_layer.h, or nothing where these leave them to the vendor's.
#include "cpu/layer/checks.h"
#include "cpu/layer/formats.h"
#include "cpu/ops/conv_choice.h"
#include "cpu/ops/conv_gradients.h"
#include "cpu/ops/conv_routes.h"

namespace wnfused::cpu {
namespace {

// Kernels of this library that run the layer; nothing where that is left to the vendor's.
std::optional<ConvLayer> own_layer(const Tensor& x, const Tensor& v, const Sliding& at, bool backward,
                                   bool kept = false) {
  const std::optional<ConvShape> shape = conv_shape(x, v, at);
  if (!shape) return std::nullopt;
  const bool pairs = is_bfloat16(x) && suits_pairs(*shape, false, backward);
  const std::optional<Method> method = pairs ? Method::kPairs : conv_layer_method(*shape, false, kept);
  if (!method) return std::nullopt;
  return ConvLayer{*shape, false, *method, x, v, nullptr, nullptr, Activation::kNone, 0.0f};
}

// v in floats, and in an order of rows that the method knows: the stage's Winograd is particular.
Tensor rows_for(const ConvLayer& layer) {
  const Tensor& v = layer.v;
  const bool flat = v.dim() < 5 && v.size(1) % kLanes == 0;
  const bool any = layer.method == Method::kDirect || layer.method == Method::kPieces || layer.method == Method::kPairs;
  const bool known = v.is_contiguous() || flat || any;
  return as_dtype(known ? v : torch::stable::contiguous(v), ScalarType::Float);
}

}  // namespace

std::optional<ConvShape> conv_shape(const Tensor& x, const Tensor& v, const Sliding& at) {
  if (x.size(1) != v.size(1) * at.groups || !is_fused_dtype(x) || !is_fused_dtype(v)) return std::nullopt;
  return ConvShape{x.size(0),
                   x.size(1),
                   v.size(0),
                   triple_of(x.sizes(), 2, 1),
                   triple_of(v.sizes(), 2, 1),
                   triple_of(at.stride, 0, 1),
                   triple_of(at.padding, 0, 0),
                   triple_of(at.dilation, 0, 1),
                   at.groups};
}

void check_window(const Tensor& x, const Tensor& v, const Sliding& at) {
  const size_t spatial = static_cast<size_t>(v.dim()) - 2;
  STD_TORCH_CHECK(v.dim() >= 3 && v.dim() <= 5 && x.dim() == v.dim(), "conv: x and v must have 3, 4 or 5 dims");
  STD_TORCH_CHECK(at.stride.size() == spatial && at.padding.size() == spatial && at.dilation.size() == spatial,
                  "conv: stride, padding and dilation must have ", spatial, " entries");
  STD_TORCH_CHECK(at.groups >= 1, "conv: groups must be at least 1");
}

std::optional<int64_t> output_extent(const Tensor& x, const Tensor& v, const Sliding& at, int64_t d) {
  constexpr int64_t kFar = int64_t{1} << 31;
  const int64_t stride = at.stride[d - 2], padding = at.padding[d - 2], dilation = at.dilation[d - 2];
  const bool known = stride >= 1 && 0 <= padding && padding < kFar && 1 <= dilation && dilation < kFar &&
                     v.size(d) >= 1;
  const int64_t room = known ? x.size(d) + 2 * padding - dilation * (v.size(d) - 1) - 1 : -1;
  return room >= 0 ? std::optional(room / stride + 1) : std::nullopt;
}

void check_output(const Tensor& t, const char* name, const Tensor& x, const Tensor& v, const Sliding& at) {
  bool fits = t.scalar_type() == x.scalar_type() && t.dim() == x.dim() && t.size(0) == x.size(0) &&
              t.size(1) == v.size(0);
  for (int64_t d = 2; fits && d < v.dim(); ++d) fits = output_extent(x, v, at, d) == t.size(d);
  STD_TORCH_CHECK(fits, "conv: ", name, " must have the dtype of x and the shape of the output");
}

std::optional<Tensor> own_conv(const ConvCall& conv, const std::optional<Tensor>& residual, float* norms,
                               KeptBanks* banks) {
  const Tensor &x = conv.x, &v = conv.v;
  const std::optional<ConvLayer> found = own_layer(x, v, conv.at, false, banks != nullptr);
  if (!found || (banks && !is_worth_keeping(found->shape, found->method))) return std::nullopt;
  const ConvShape& shape = found->shape;
  const bool last = gives_channels_last(conv);
  const bool passes = conv.activation != Activation::kNone || residual;
  if (is_vendors_bfloat16(*found) || is_vendors(*found, last, passes)) return std::nullopt;
  const Tensor y = empty_map(map_sizes(shape.images, shape.outputs, shape.output_size(), v.dim()), last, x.scalar_type());
  const Tensor rows = rows_for(*found), lines = with_even_lines(x);
  check_residual(residual, y);
  const std::optional<Tensor> added = residual ? std::optional(with_even_lines(*residual)) : std::nullopt;
  const ConvLayer layer{shape, false, found->method, lines, rows, conv.gain, conv.bias, conv.activation, conv.slope};
  return run_kept_layer(layer, added, y, norms, banks) ? std::optional(y) : std::nullopt;
}

std::optional<LayerGradients> own_conv_backward(const ConvCall& conv, const Tensor& dy, const Tensor& y,
                                                const float* norms, const ConvNeeds& needs, float* dgain) {
  const Tensor &x = conv.x, &v = conv.v;
  // A bias gradient without that of the weight would need a pass of its own.
  const bool ours = needs.v || (needs.x && !needs.bias);
  const std::optional<ConvLayer> found = ours ? own_layer(x, v, conv.at, true) : std::nullopt;
  if (!found) return std::nullopt;
  const ConvShape& shape = found->shape;
  const bool vendors = is_vendors_backward(*found, gives_channels_last(conv), needs.x);
  if ((is_vendors_bfloat16(*found) && !meets_padding(shape)) || vendors) return std::nullopt;
  const Tensor rows = rows_for(*found), lines = with_even_lines(x);
  const ConvLayer layer{shape, false, found->method, lines, rows, conv.gain, nullptr, conv.activation, conv.slope};
  const LayerGradients made = empty_gradients(conv, rows, y, needs);
  const Tensor signs = conv.activation == Activation::kNone ? dy : with_even_lines(y);
  if (!run_conv_layer_backward(layer, with_even_lines(dy), signs, norms, to_fill(made, dgain))) return std::nullopt;
  return in_format_of(v, made);
}

}  // namespace wnfused::cpu

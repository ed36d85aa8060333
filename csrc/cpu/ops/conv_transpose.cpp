// conv_transpose: y = act(conv_transpose(x, w) + b + residual) with rows of v along x's channels, and its gradients.
//
// It is the data gradient of a convolution from y's map to x's (window.h): with few channels on a side by strips
// (strip_layer.h), on few pixels by the kernels of linear layers (conv_transpose_unfolded.h), else by those of
// conv_layer.h. What neither is faster at, and what meets a value that is
// not finite, is answered by nothing: the caller composes it of the row norm and the vendor's product
// (wnfused/backends/native.py).
#include <torch/csrc/stable/library.h>

#include "cpu/layer/checks.h"
#include "cpu/layer/formats.h"
#include "cpu/layer/gains.h"
#include "cpu/layer/tensor.h"
#include "cpu/ops/conv_choice.h"
#include "cpu/ops/conv_extents.h"
#include "cpu/ops/conv_transpose_unfolded.h"
#include "cpu/ops/kept_banks.h"
#include "cpu/ops/strip_layer.h"
#include "ops.h"

namespace wnfused {
namespace {

using namespace cpu;

struct TransposedSliding {
  const Extents &stride, &padding, &dilation, &output_padding;
  int64_t groups;
};

void check(const Tensor& x, const Tensor& v, const Tensor& g, const std::optional<Tensor>& bias,
           const TransposedSliding& at) {
  STD_TORCH_CHECK(v.dim() >= 3 && v.dim() <= 5 && x.dim() == v.dim(),
                  "conv_transpose: x and v must have 3, 4 or 5 dims");
  check_parameters(x, v, g, std::nullopt);
  const size_t spatial = static_cast<size_t>(v.dim()) - 2;
  STD_TORCH_CHECK(at.stride.size() == spatial && at.padding.size() == spatial && at.dilation.size() == spatial &&
                      at.output_padding.size() == spatial,
                  "conv_transpose: stride, padding, dilation and output_padding must have ", spatial, " entries");
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == v.size(1) * at.groups),
                  "conv_transpose: bias must have ", v.size(1) * at.groups, " entries");
  STD_TORCH_CHECK(!bias || bias->scalar_type() == ScalarType::Float || bias->scalar_type() == x.scalar_type(),
                  "conv_transpose: bias must have the dtype of x, or float32");
}

// The convolution whose data gradient the layer is; nothing where the kernels cannot describe it.
std::optional<ConvShape> conv_shape(const Tensor& x, const Tensor& v, const TransposedSliding& at) {
  if (at.groups != 1 || x.size(1) != v.size(0) || !has_dense_rows(v) || !is_fused_dtype(x) || !is_fused_dtype(v))
    return std::nullopt;
  const Triple input = triple_of(x.sizes(), 2, 1), kernel = triple_of(v.sizes(), 2, 1);
  const Triple stride = triple_of(at.stride, 0, 1), padding = triple_of(at.padding, 0, 0);
  const Triple dilation = triple_of(at.dilation, 0, 1), extra = triple_of(at.output_padding, 0, 0);
  const auto extent = [&](int64_t Triple::*at) {
    return (input.*at - 1) * stride.*at - 2 * (padding.*at) + dilation.*at * (kernel.*at - 1) + extra.*at + 1;
  };
  const Triple output{extent(&Triple::level), extent(&Triple::row), extent(&Triple::column)};
  const ConvShape shape{x.size(0), v.size(1), v.size(0), output, kernel, stride, padding, dilation, 1};
  if (std::min({extra.level, extra.row, extra.column}) < 0 || !shape.is_sound()) return std::nullopt;
  // An output_padding of a stride or more adds rows of y that no pixel of x reaches.
  return shape.output_size() == input ? std::optional(shape) : std::nullopt;
}

// In bfloat16: whether the vendor's products are the faster ones, though they are composed with other calls.
bool is_vendors_bfloat16(const Tensor& x, const ConvShape& shape) {
  constexpr int64_t kTimes = 4;
  if (!is_bfloat16(x) || suits_pairs(shape, true, false) || meets_padding(shape)) return false;
  return has_many_bfloat16_products(shape, kTimes);
}

// How this library multiplies the layer, if it does. kept: see conv_layer_method.
std::optional<Method> method_for(const Tensor& x, const ConvShape& shape, bool kept = false) {
  return is_bfloat16(x) && suits_pairs(shape, true, false) ? Method::kPairs : conv_layer_method(shape, true, kept);
}

bool goes_by_strips(const Tensor& x, const Tensor& v, const ConvShape& shape) {
  const bool floats = x.scalar_type() == ScalarType::Float && v.scalar_type() == ScalarType::Float;
  return floats && suits_strips(shape, suggests_channels_last(x) || suggests_channels_last(v));
}

StripLayer strip_layer(const TransposedCall& call) {
  return {call.shape, true, call.x, call.v, call.gain, call.bias, call.activation, call.slope};
}

// What the kernels read maps as. bfloat16 maps of few pixels are nothing beside the weights.
ScalarType map_dtype(const Tensor& x, bool few) { return few ? ScalarType::Float : x.scalar_type(); }

// y and the norms. banks: see kept_banks.h.
std::tuple<Gradient, Gradient> forward(
    const Tensor& x, const Tensor& v, const Tensor& g, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual, const TransposedSliding& at, int64_t activation, double slope,
    KeptBanks* banks) {
  check(x, v, g, bias, at);
  check_residual_dtype(residual, x);  // whoever composes the layer does not
  check_activation(activation, slope);
  const std::optional<ConvShape> shape = conv_shape(x, v, at);
  if (!shape) return {};
  const bool strips = goes_by_strips(x, v, *shape);
  // Beside all other ways kept banks are faster, on few pixels too.
  const bool keeps = !strips && banks && is_worth_keeping(*shape, Method::kDirect) && method_for(x, *shape, true);
  const bool few = !strips && !keeps && suits_transposed_unfolding(*shape);
  const std::optional<Method> own = method_for(x, *shape, keeps);
  if (!strips && !few && (!own || is_vendors_bfloat16(x, *shape))) return {};
  const ScalarType dtype = map_dtype(x, few);
  const Tensor y = empty_map(map_sizes(shape->images, shape->inputs, shape->size, v.dim()),
                             suggests_channels_last(x) || suggests_channels_last(v), dtype);
  const auto readable = [&](const Tensor& map) { return strips ? for_strips(map) : with_even_lines(as_dtype(map, dtype)); };
  std::optional<Tensor> added;
  if (residual) added = strips ? *residual : readable(*residual);
  check_residual(added, y);
  if (added && strips) added = laid_out_as(*added, y);
  const Tensor map = readable(x), weights = as_dtype(v, ScalarType::Float);
  std::vector<float> held_gain, held_bias;
  const TransposedCall call{*shape, map, weights, floats_of(g, held_gain), bias ? floats_of(*bias, held_bias) : nullptr,
                            static_cast<Activation>(activation), static_cast<float>(slope)};
  Tensor norm = empty({v.size(0)}, ScalarType::Float);
  float* norms = static_cast<float*>(norm.mutable_data_ptr());
  const auto fill = [&] {
    if (strips) return run_strips(strip_layer(call), added, y, norms);
    if (few) return unfolded_conv_transpose(call, added, y, norms);
    const ConvLayer layer{*shape, true, *own, map, weights, call.gain, call.bias, call.activation, call.slope};
    return run_kept_layer(layer, added, y, norms, keeps ? banks : nullptr);
  };
  if (!fill()) return {};
  return {as_dtype(y, x.scalar_type()), norm};
}

}  // namespace

std::tuple<Gradient, Gradient> conv_transpose(
    const Tensor& x, const Tensor& v, const Tensor& g, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual, const Extents& stride, const Extents& padding, const Extents& dilation,
    const Extents& output_padding, int64_t groups, int64_t activation, double slope) {
  const TransposedSliding at{stride, padding, dilation, output_padding, groups};
  return forward(x, v, g, bias, residual, at, activation, slope, nullptr);
}

std::tuple<Gradient, Gradient> kept_conv_transpose(
    const Tensor& x, const Tensor& v, const Tensor& g, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual, const std::vector<Tensor>& known, const Extents& stride,
    const Extents& padding, const Extents& dilation, const Extents& output_padding, int64_t groups, int64_t activation,
    double slope) {
  const TransposedSliding at{stride, padding, dilation, output_padding, groups};
  KeptBanks banks{known, {}};
  const Gradient y = std::get<0>(forward(x, v, g, bias, residual, at, activation, slope, &banks));
  return {y, banks.added};
}

std::tuple<bool, Gradient, Gradient, Gradient, Gradient, Gradient> conv_transpose_backward(
    const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& v, const Tensor& g, const Tensor& norm,
    int64_t needs, const Extents& stride, const Extents& padding, const Extents& dilation,
    const Extents& output_padding, int64_t groups, int64_t activation, double slope) {
  const TransposedSliding at{stride, padding, dilation, output_padding, groups};
  check(x, v, g, std::nullopt, at);
  check_activation(activation, slope);
  const bool need_x = needs & 1, need_v = needs & 2, need_bias = needs & 4, need_residual = needs & 8;
  // A bias gradient without that of the weight would need a pass of its own.
  const bool ours = need_v || (need_x && !need_bias);
  const std::optional<ConvShape> shape = ours ? conv_shape(x, v, at) : std::nullopt;
  if (!shape) return {};
  const std::optional<Method> own = method_for(x, *shape);
  const bool strips = goes_by_strips(x, v, *shape);
  const bool few = !strips && suits_transposed_unfolding_backward(*shape, need_x, conv_layer_method(*shape, true));
  if (!strips && !few && (!own || is_vendors_bfloat16(x, *shape))) return {};
  const bool masked = activation != 0;
  const bool last = suggests_channels_last(x) || suggests_channels_last(v);
  const Extents sizes = map_sizes(shape->images, shape->inputs, shape->size, v.dim());
  check_gradient(dy, "dy", sizes, x);
  if (masked) check_gradient(y, "y", sizes, x);
  check_norm(norm, v.size(0));
  const ScalarType dtype = map_dtype(x, few);
  const auto readable = [&](const Tensor& map) { return strips ? for_strips(map) : with_even_lines(as_dtype(map, dtype)); };
  const Tensor map = readable(x), signs = readable(masked ? y : dy);
  const Tensor gradient = strips ? laid_out_as(dy, signs) : masked ? readable(dy) : signs;
  const Tensor weights = as_dtype(v, ScalarType::Float);
  std::vector<float> held;
  const TransposedCall call{*shape, map, weights, floats_of(g, held), nullptr, static_cast<Activation>(activation),
                            static_cast<float>(slope)};
  Rounded dgain(sizes_of(g), g.scalar_type());
  Gradient dx, dv, db, dz;
  if (need_x) dx = empty_map(sizes_of(x), last, dtype);
  if (need_v) dv = empty_as(weights);
  if (need_bias) db = empty({shape->inputs}, ScalarType::Float);
  if (need_residual && masked) dz = empty_map(sizes, is_channels_last(signs), dtype);
  float* dbias = db ? static_cast<float*>(db->mutable_data_ptr()) : nullptr;
  const float* norms = entries<float>(norm);
  const auto fill = [&] {
    if (strips) return run_strips_backward(strip_layer(call), gradient, signs, norms, {dx, dv, dz, dgain.data(), dbias});
    if (few) return unfolded_conv_transpose_backward(call, gradient, signs, norms, {dx, dv, dz, dgain.data(), dbias});
    const ConvLayer layer{*shape, true, *own, map, weights, call.gain, nullptr, call.activation, call.slope};
    return run_conv_layer_backward(layer, gradient, signs, norms, {dx, dv, dz, dgain.data(), dbias});
  };
  if (!fill()) return {};
  const auto rounded = [](const Gradient& made, const Tensor& like) {
    return made ? Gradient(as_dtype(*made, like.scalar_type())) : Gradient();
  };
  return {true, rounded(dx, x), rounded(dv, v), need_v ? Gradient(dgain.tensor()) : Gradient(), rounded(db, v),
          rounded(dz, x)};
}

}  // namespace wnfused

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CPU, library) {
  library.impl("conv_transpose", TORCH_BOX(&wnfused::conv_transpose));
  library.impl("kept_conv_transpose", TORCH_BOX(&wnfused::kept_conv_transpose));
  library.impl("conv_transpose_backward", TORCH_BOX(&wnfused::conv_transpose_backward));
}

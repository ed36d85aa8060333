// conv_transpose: y = act(conv_transpose(x, w) + b + residual) with rows of v along x's channels, and its gradients.
//
// It is the data gradient of a convolution from y's map to x's (window.h), and goes the way that is chosen for it
// (choice.h); the vendor's (conv_vendor.cpp) where there are several groups or a value is not finite. Of a plain one,
// v the weight itself, the answer is nothing then: the caller asks the vendor (wnfused/backends/native_composed.py).
#include <torch/csrc/stable/library.h>

#include "cpu/layer/checks.h"
#include "cpu/layer/formats.h"
#include "cpu/layer/gains.h"
#include "cpu/layer/tensor.h"
#include "cpu/ops/conv_gradients.h"
#include "cpu/ops/conv_routes.h"
#include "cpu/ops/conv_transpose_unfolded.h"
#include "cpu/ops/kept_banks.h"
#include "cpu/ops/strip_layer.h"
#include "ops.h"

namespace wnfused {
namespace {

using namespace cpu;

void check(const Tensor& x, const Tensor& v, const std::optional<Tensor>& bias, const Sliding& at) {
  STD_TORCH_CHECK(at.groups >= 1, "conv_transpose: groups must be at least 1");
  STD_TORCH_CHECK(v.dim() >= 3 && v.dim() <= 5 && x.dim() == v.dim(),
                  "conv_transpose: x and v must have 3, 4 or 5 dims");
  STD_TORCH_CHECK(v.numel() > 0 && x.size(1) == v.size(0) && v.size(0) % at.groups == 0,
                  "conv_transpose: v must have taps, and as many rows, a multiple of groups, as x has channels");
  const size_t spatial = static_cast<size_t>(v.dim()) - 2;
  const Extents& output_padding = *at.output_padding;
  STD_TORCH_CHECK(at.stride.size() == spatial && at.padding.size() == spatial && at.dilation.size() == spatial &&
                      output_padding.size() == spatial,
                  "conv_transpose: stride, padding, dilation and output_padding must have ", spatial, " entries");
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == v.size(1) * at.groups),
                  "conv_transpose: bias must have ", v.size(1) * at.groups, " entries");
  STD_TORCH_CHECK(!bias || bias->scalar_type() == ScalarType::Float || bias->scalar_type() == x.scalar_type(),
                  "conv_transpose: bias must have the dtype of x, or float32");
  STD_TORCH_CHECK(are_near(at.stride) && are_near(at.padding) && are_near(at.dilation) && are_near(output_padding),
                  "conv_transpose: stride, padding, dilation and output_padding must be below 2^31");
  for (size_t d = 0; d < spatial; ++d) {
    const int64_t dim = static_cast<int64_t>(d) + 2, extent = transposed_extent(x, v, at, dim);
    STD_TORCH_CHECK(extent > 0 || (extent == 0 && x.size(0) == 0), "conv_transpose: the output would have ", extent,
                    " pixels along dim ", dim);
  }
}

// The convolution whose data gradient the layer is; one that is not sound where the kernels cannot describe it.
ConvShape shape_of(const Tensor& x, const Tensor& v, const Sliding& at) {
  if (at.groups != 1 || !has_dense_rows(v) || !is_fused_dtype(x) || !is_fused_dtype(v)) return {};
  if (is_bfloat16(v) && !is_bfloat16(x)) return {};
  const Triple input = triple_of(x.sizes(), 2, 1), kernel = triple_of(v.sizes(), 2, 1);
  const Triple stride = triple_of(at.stride, 0, 1), padding = triple_of(at.padding, 0, 0);
  const Triple dilation = triple_of(at.dilation, 0, 1), extra = triple_of(*at.output_padding, 0, 0);
  const auto extent = [&](int64_t Triple::*of) {
    return (input.*of - 1) * stride.*of - 2 * (padding.*of) + dilation.*of * (kernel.*of - 1) + extra.*of + 1;
  };
  const Triple output{extent(&Triple::level), extent(&Triple::row), extent(&Triple::column)};
  const ConvShape shape{x.size(0), v.size(1), v.size(0), output, kernel, stride, padding, dilation, 1};
  if (std::min({extra.level, extra.row, extra.column}) < 0 || !shape.is_sound()) return {};
  // An output_padding of a stride or more adds rows of y that no pixel of x reaches.
  return shape.output_size() == input ? shape : ConvShape{};
}

Extents output_sizes(const ConvCall& call) {
  return map_sizes(call.shape.images, call.shape.inputs, call.shape.size, call.v.dim());
}

Tensor empty_y(const ConvCall& call, ScalarType dtype) {
  return empty_map(output_sizes(call), gives_channels_last(call), dtype);
}

// Maps for the kernels of this library, and, in floats, for those of linear layers: bfloat16 maps of few pixels are
// nothing beside the weights.
Tensor readable(const Tensor& map, ScalarType dtype) { return with_even_lines(as_dtype(map, dtype)); }

std::optional<Tensor> readable(const std::optional<Tensor>& residual, ScalarType dtype) {
  return residual ? std::optional(readable(*residual, dtype)) : std::nullopt;
}

StripLayer strip_layer(const ConvCall& call, const Tensor& x) {
  return {call.shape, true, x, call.v, call.gain, call.bias, call.activation, call.slope};
}

ConvCall with_tensors(const ConvCall& call, const Tensor& x, const Tensor& v) {
  return {call.shape, x, v, call.gain, call.bias, call.at, call.activation, call.slope};
}

// v in floats, but for the kernels of pairs and the vendor, who read it as it is.
Tensor weights_for(const ConvChoice& choice, const Tensor& v) {
  const bool pairs = choice.way == ConvWay::kOwn && choice.method == Method::kPairs;
  return pairs || choice.way == ConvWay::kVendor ? v : as_dtype(v, ScalarType::Float);
}

ConvLayer own_layer(const ConvCall& call, Method method, const Tensor& x) {
  return {call.shape, true, method, x, call.v, call.gain, call.bias, call.activation, call.slope};
}

std::optional<Tensor> strips_forward(const ConvCall& call, const std::optional<Tensor>& residual, float* norms) {
  const Tensor x = in_lines(call.x), y = empty_y(call, ScalarType::Float);
  check_residual(residual, y);
  const std::optional<Tensor> added = residual ? std::optional(laid_out_as(*residual, y)) : std::nullopt;
  return run_strips(strip_layer(call, x), added, y, norms) ? std::optional(y) : std::nullopt;
}

std::optional<Tensor> unfolded_forward(const ConvCall& call, const std::optional<Tensor>& residual,
                                       float* norms) {
  const Tensor x = readable(call.x, ScalarType::Float), y = empty_y(call, ScalarType::Float);
  const std::optional<Tensor> added = readable(residual, ScalarType::Float);
  check_residual(added, y);
  return unfolded_conv_transpose(with_tensors(call, x, call.v), added, y, norms) ? std::optional(y) : std::nullopt;
}

std::optional<Tensor> own_forward(const ConvCall& call, Method method, const std::optional<Tensor>& residual,
                                  float* norms, KeptBanks* banks) {
  const ScalarType dtype = call.x.scalar_type();
  const Tensor x = readable(call.x, dtype), y = empty_y(call, dtype);
  const std::optional<Tensor> added = readable(residual, dtype);
  check_residual(added, y);
  return run_kept_layer(own_layer(call, method, x), added, y, norms, banks) ? std::optional(y) : std::nullopt;
}

std::optional<Tensor> forward_by(const ConvChoice& choice, const ConvCall& call,
                                 const std::optional<Tensor>& residual, float* norms, KeptBanks* banks) {
  switch (choice.way) {
    case ConvWay::kStrips: return strips_forward(call, residual, norms);
    case ConvWay::kUnfolded: return unfolded_forward(call, residual, norms);
    case ConvWay::kOwn: return own_forward(call, choice.method, residual, norms, choice.keeps ? banks : nullptr);
    case ConvWay::kPlanes:
    case ConvWay::kVendor: break;
  }
  return std::nullopt;
}

// In the format that the kernels give: torch drops it where it unfolds a volume, vendor_product of groups' weights.
Tensor in_format_of(const ConvCall& call, const Tensor& y) {
  return gives_channels_last(call) ? in_channels_last(y) : y;
}

// By the kernels of this library; nothing where it is the vendor's.
std::optional<Tensor> forward_of(const ConvCall& call, const std::optional<Tensor>& residual, float* norms,
                                 KeptBanks* banks) {
  const bool passes = call.activation != Activation::kNone || residual;
  const ConvChoice choice = choose_forward(traits_of(call), {passes, banks != nullptr});
  const Tensor weights = weights_for(choice, call.v);
  const std::optional<Tensor> y = forward_by(choice, with_tensors(call, call.x, weights), residual, norms, banks);
  return y ? std::optional(as_dtype(*y, call.x.scalar_type())) : std::nullopt;
}

// y and the norms.
std::tuple<Tensor, Tensor> forward(
    const Tensor& x, const Tensor& v_given, const Tensor& g, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual, const Sliding& at, int64_t activation, double slope, KeptBanks* banks) {
  check_parameters(x, v_given, g, std::nullopt);
  check(x, v_given, bias, at);
  check_residual_dtype(residual, x);
  check_activation(activation, slope);
  const Tensor v = has_dense_rows(v_given) ? v_given : torch::stable::contiguous(v_given);
  std::vector<float> held_gain, held_bias;
  const ConvCall call{shape_of(x, v, at), x, v, floats_of(g, held_gain), bias ? floats_of(*bias, held_bias) : nullptr,
                      at, static_cast<Activation>(activation), static_cast<float>(slope)};
  Tensor norm = empty({v.size(0)}, ScalarType::Float);
  float* norms = static_cast<float*>(norm.mutable_data_ptr());
  const std::optional<Tensor> y = forward_of(call, residual, norms, banks);
  return {y ? *y : in_format_of(call, vendor_conv(call, bias, residual, norms)), norm};
}

// What the backward is given besides the layer: dy, and y where the layer has an activation.
struct Given {
  const Tensor &dy, &y;
  const float* norms;
  Needs needs;
  float* dgain;
};

// dz is laid out as a map of the output's sizes.
LayerGradients empty_gradients(const ConvCall& call, const Tensor& like, ScalarType dtype, const Needs& needs) {
  LayerGradients made;
  if (needs.x) made.dx = empty_map(sizes_of(call.x), gives_channels_last(call), dtype);
  if (needs.v) made.dv = empty_as(call.v);
  if (needs.bias) made.dbias = empty({call.shape.inputs}, ScalarType::Float);
  if (needs.residual && call.activation != Activation::kNone)
    made.dz = empty_map(output_sizes(call), is_channels_last(like), dtype);
  return made;
}

std::optional<LayerGradients> strips_backward(const ConvCall& call, const Given& given) {
  const bool masked = call.activation != Activation::kNone;
  const Tensor x = in_lines(call.x), y = in_lines(masked ? given.y : given.dy);
  const Tensor dy = masked ? laid_out_as(given.dy, y) : y;
  const LayerGradients made = empty_gradients(call, y, ScalarType::Float, given.needs);
  const bool done = run_strips_backward(strip_layer(call, x), dy, y, given.norms, to_fill(made, given.dgain));
  return done ? std::optional(made) : std::nullopt;
}

std::optional<LayerGradients> unfolded_backward(const ConvCall& call, const Given& given) {
  const bool masked = call.activation != Activation::kNone;
  const Tensor x = readable(call.x, ScalarType::Float), y = readable(masked ? given.y : given.dy, ScalarType::Float);
  const Tensor dy = masked ? readable(given.dy, ScalarType::Float) : y;
  const LayerGradients made = empty_gradients(call, y, ScalarType::Float, given.needs);
  const ConvGradients gradients = to_fill(made, given.dgain);
  const bool done = unfolded_conv_transpose_backward(with_tensors(call, x, call.v), dy, y, given.norms, gradients);
  return done ? std::optional(made) : std::nullopt;
}

std::optional<LayerGradients> own_backward(const ConvCall& call, Method method, const Given& given) {
  const bool masked = call.activation != Activation::kNone;
  const ScalarType dtype = call.x.scalar_type();
  const Tensor x = readable(call.x, dtype), y = readable(masked ? given.y : given.dy, dtype);
  const Tensor dy = masked ? readable(given.dy, dtype) : y;
  const LayerGradients made = empty_gradients(call, y, dtype, given.needs);
  const ConvGradients gradients = to_fill(made, given.dgain);
  const bool done = run_conv_layer_backward(own_layer(call, method, x), dy, y, given.norms, gradients);
  return done ? std::optional(made) : std::nullopt;
}

std::optional<LayerGradients> backward_by(const ConvChoice& choice, const ConvCall& call, const Given& given) {
  switch (choice.way) {
    case ConvWay::kStrips: return strips_backward(call, given);
    case ConvWay::kUnfolded: return unfolded_backward(call, given);
    case ConvWay::kOwn: return own_backward(call, choice.method, given);
    case ConvWay::kPlanes:
    case ConvWay::kVendor: break;
  }
  return std::nullopt;
}

using Found = std::tuple<Gradient, Gradient, Gradient, Gradient, Gradient>;

// By the kernels of this library; nothing where it is the vendor's.
std::optional<LayerGradients> backward_of(const ConvCall& layer, const Given& given) {
  const ConvChoice choice = choose_backward(traits_of(layer), given.needs);
  const Tensor weights = weights_for(choice, layer.v);
  return backward_by(choice, with_tensors(layer, layer.x, weights), given);
}

void check_gradients(const ConvCall& layer, const Tensor& dy, const Tensor& y) {
  Extents sizes{layer.x.size(0), layer.v.size(1) * layer.at.groups};
  for (int64_t d = 2; d < layer.v.dim(); ++d) sizes.push_back(transposed_extent(layer.x, layer.v, layer.at, d));
  check_gradient(dy, "dy", sizes, layer.x);
  if (layer.activation != Activation::kNone) check_gradient(y, "y", sizes, layer.x);
}

// Rounded to the dtypes of the layer's own tensors.
Found in_dtypes_of(const ConvCall& layer, const LayerGradients& made, const Gradient& dgain) {
  const auto rounded = [](const Gradient& found, const Tensor& like) {
    return found ? Gradient(as_dtype(*found, like.scalar_type())) : Gradient();
  };
  return {rounded(made.dx, layer.x), rounded(made.dv, layer.v), dgain, rounded(made.dbias, layer.v),
          rounded(made.dz, layer.x)};
}

}  // namespace

std::tuple<Tensor, Tensor> conv_transpose(
    const Tensor& x, const Tensor& v, const Tensor& g, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual, const Extents& stride, const Extents& padding, const Extents& dilation,
    const Extents& output_padding, int64_t groups, int64_t activation, double slope) {
  const Sliding at{stride, padding, dilation, groups, &output_padding};
  return forward(x, v, g, bias, residual, at, activation, slope, nullptr);
}

std::tuple<Tensor, Gradient> kept_conv_transpose(
    const Tensor& x, const Tensor& v, const Tensor& g, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual, const std::vector<Tensor>& known, const Extents& stride,
    const Extents& padding, const Extents& dilation, const Extents& output_padding, int64_t groups, int64_t activation,
    double slope) {
  const Sliding at{stride, padding, dilation, groups, &output_padding};
  KeptBanks banks{known, {}};
  const Tensor y = std::get<0>(forward(x, v, g, bias, residual, at, activation, slope, &banks));
  return {y, banks.added};
}

Found conv_transpose_backward(
    const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& v_given, const Tensor& g, const Tensor& norm,
    int64_t needs_given, const Extents& stride, const Extents& padding, const Extents& dilation,
    const Extents& output_padding, int64_t groups, int64_t activation, double slope) {
  const Sliding at{stride, padding, dilation, groups, &output_padding};
  check_parameters(x, v_given, g, std::nullopt);
  check(x, v_given, std::nullopt, at);
  check_activation(activation, slope);
  check_norm(norm, v_given.size(0));
  const Tensor v = has_dense_rows(v_given) ? v_given : torch::stable::contiguous(v_given);
  std::vector<float> held;
  const ConvCall layer{shape_of(x, v, at), x, v, floats_of(g, held), nullptr, at,
                       static_cast<Activation>(activation), static_cast<float>(slope)};
  check_gradients(layer, dy, y);
  const Needs needs = Needs::of(needs_given);
  std::optional<Rounded> dgain;
  if (needs.v) dgain.emplace(sizes_of(g), g.scalar_type());
  const Given given{dy, y, entries<float>(norm), needs, dgain ? dgain->data() : nullptr};
  std::optional<LayerGradients> made = backward_of(layer, given);
  if (!made) made = vendor_conv_backward(layer, dy, y, given.norms, needs, given.dgain);
  return in_dtypes_of(layer, *made, dgain ? Gradient(dgain->tensor()) : Gradient());
}

Gradient plain_conv_transpose(
    const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
    const Extents& stride, const Extents& padding, const Extents& dilation, const Extents& output_padding,
    int64_t groups, int64_t activation, double slope) {
  const Sliding at{stride, padding, dilation, groups, &output_padding};
  check(x, w, bias, at);
  check_residual_dtype(residual, x);
  check_activation(activation, slope);
  const ConvShape shape = shape_of(x, w, at);
  if (!shape.is_sound()) return std::nullopt;
  std::vector<float> held;
  const ConvCall call{shape, x, w, nullptr, bias ? floats_of(*bias, held) : nullptr, at,
                      static_cast<Activation>(activation), static_cast<float>(slope)};
  return forward_of(call, residual, nullptr, nullptr);
}

std::tuple<bool, Gradient, Gradient, Gradient, Gradient> plain_conv_transpose_backward(
    const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& w, int64_t needs, const Extents& stride,
    const Extents& padding, const Extents& dilation, const Extents& output_padding, int64_t groups, int64_t activation,
    double slope) {
  const Sliding at{stride, padding, dilation, groups, &output_padding};
  check(x, w, std::nullopt, at);
  check_activation(activation, slope);
  const ConvCall layer{shape_of(x, w, at), x, w, nullptr, nullptr, at, static_cast<Activation>(activation),
                       static_cast<float>(slope)};
  if (!layer.shape.is_sound()) return {};
  check_gradients(layer, dy, y);
  const std::optional<LayerGradients> made = backward_of(layer, {dy, y, nullptr, Needs::of(needs), nullptr});
  if (!made) return {};
  const auto [dx, dw, dg, dbias, dz] = in_dtypes_of(layer, *made, std::nullopt);
  return {true, dx, dw, dbias, dz};
}

}  // namespace wnfused

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CPU, library) {
  library.impl("conv_transpose", TORCH_BOX(&wnfused::conv_transpose));
  library.impl("kept_conv_transpose", TORCH_BOX(&wnfused::kept_conv_transpose));
  library.impl("conv_transpose_backward", TORCH_BOX(&wnfused::conv_transpose_backward));
  library.impl("plain_conv_transpose", TORCH_BOX(&wnfused::plain_conv_transpose));
  library.impl("plain_conv_transpose_backward", TORCH_BOX(&wnfused::plain_conv_transpose_backward));
}

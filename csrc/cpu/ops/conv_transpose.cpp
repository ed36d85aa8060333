// conv_transpose: y = act(conv_transpose(x, w) + b + residual) with rows of v along x's channels, and its gradients.
//
// It is the data gradient of a convolution from y's map to x's (window.h): on few pixels by the kernels of linear layers
// (conv_transpose_unfolded.h), else by those of conv_layer.h. What neither is faster at, and what meets a value that is
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

// The convolution whose data gradient the layer is; nothing where the kernels have no word for it.
std::optional<ConvShape> conv_shape(const Tensor& x, const Tensor& v, const TransposedSliding& at) {
  const bool known = at.groups == 1 && x.size(1) == v.size(0) && has_dense_rows(v) &&
                     x.scalar_type() == ScalarType::Float && v.scalar_type() == ScalarType::Float;
  if (!known) return std::nullopt;
  const Triple input = triple_of(x.sizes(), 2, 1), kernel = triple_of(v.sizes(), 2, 1);
  const Triple stride = triple_of(at.stride, 0, 1), padding = triple_of(at.padding, 0, 0);
  const Triple dilation = triple_of(at.dilation, 0, 1), extra = triple_of(at.output_padding, 0, 0);
  const auto extent = [&](int64_t Triple::*at) {
    return (input.*at - 1) * stride.*at - 2 * (padding.*at) + dilation.*at * (kernel.*at - 1) + extra.*at + 1;
  };
  const Triple output{extent(&Triple::level), extent(&Triple::row), extent(&Triple::column)};
  const ConvShape shape{x.size(0), v.size(1), v.size(0), output, kernel, stride, padding, dilation, 1};
  if (std::min({extra.level, extra.row, extra.column}) < 0 || !shape.is_sound()) return std::nullopt;
  // An output_padding of a stride or more has rows of y that no pixel of x knows.
  return shape.output_size() == input ? std::optional(shape) : std::nullopt;
}

// y and the norms. banks: see kept_banks.h.
std::tuple<Gradient, Gradient> forward(
    const Tensor& x, const Tensor& v, const Tensor& g, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual, const TransposedSliding& at, int64_t activation, double slope,
    KeptBanks* banks) {
  check(x, v, g, bias, at);
  check_activation(activation, slope);
  const std::optional<ConvShape> shape = conv_shape(x, v, at);
  if (!shape) return {};
  std::vector<float> held_gain, held_bias;
  const TransposedCall call{*shape, x, v, floats_of(g, held_gain), bias ? floats_of(*bias, held_bias) : nullptr,
                            static_cast<Activation>(activation), static_cast<float>(slope)};
  // Kept banks are faster than any other way, on few pixels too.
  const bool keeps = banks && is_worth_keeping(*shape, Method::kDirect) && conv_layer_method(*shape, true, true);
  const bool few = !keeps && suits_unfolding(call);
  if (!few && !keeps && !conv_layer_method(*shape, true)) return {};
  const Tensor y = empty_map(map_sizes(shape->images, shape->inputs, shape->size, v.dim()),
                             suggests_channels_last(x) || suggests_channels_last(v), ScalarType::Float);
  check_residual(residual, y);
  Tensor norm = empty({v.size(0)}, ScalarType::Float);
  float* norms = static_cast<float*>(norm.mutable_data_ptr());
  if (few) {
    if (!unfolded_conv_transpose(call, residual, y, norms)) return {};
    return {y, norm};
  }
  const Tensor lines = with_even_lines(x);
  const std::optional<Tensor> added = residual ? std::optional(with_even_lines(*residual)) : std::nullopt;
  const ConvLayer layer{*shape, true, Method::kDirect, lines, v, call.gain, call.bias, call.activation, call.slope};
  if (!run_kept_layer(layer, added, y, norms, keeps ? banks : nullptr)) return {};
  return {y, norm};
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
  std::vector<float> held;
  const TransposedCall call{*shape, x, v, floats_of(g, held), nullptr, static_cast<Activation>(activation),
                            static_cast<float>(slope)};
  const std::optional<Method> own = conv_layer_method(*shape, true);
  const bool few = suits_unfolding_backward(call, need_x, own);
  if (!few && !own) return {};
  const bool masked = activation != 0;
  const bool last = suggests_channels_last(x) || suggests_channels_last(v);
  const Extents sizes = map_sizes(shape->images, shape->inputs, shape->size, v.dim());
  check_gradient(dy, "dy", sizes);
  if (masked) check_gradient(y, "y", sizes);
  check_norm(norm, v.size(0));
  Rounded dgain(sizes_of(g), g.scalar_type());
  Gradient dx, dv, db, dz;
  if (need_x) dx = empty_map(sizes_of(x), last, ScalarType::Float);
  if (need_v) dv = empty_as(v);
  if (need_bias) db = empty({shape->inputs}, ScalarType::Float);
  if (need_residual && masked)
    dz = empty_map(sizes, is_channels_last(y), ScalarType::Float);
  float* dbias = db ? static_cast<float*>(db->mutable_data_ptr()) : nullptr;
  const float* norms = entries<float>(norm);
  bool found;
  if (few) {
    found = unfolded_conv_transpose_backward(call, dy, y, norms, {dx, dv, dz, dgain.data(), dbias});
  } else {
    const Tensor lines = with_even_lines(x), signs = masked ? with_even_lines(y) : dy;
    const ConvLayer layer{*shape, true, Method::kDirect, lines, v, call.gain, nullptr, call.activation, call.slope};
    found = run_conv_layer_backward(layer, with_even_lines(dy), signs, norms, {dx, dv, dz, dgain.data(), dbias});
  }
  if (!found) return {};
  return {true, dx, dv, need_v ? Gradient(dgain.tensor()) : Gradient(), db, dz};
}

}  // namespace wnfused

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CPU, library) {
  library.impl("conv_transpose", TORCH_BOX(&wnfused::conv_transpose));
  library.impl("kept_conv_transpose", TORCH_BOX(&wnfused::kept_conv_transpose));
  library.impl("conv_transpose_backward", TORCH_BOX(&wnfused::conv_transpose_backward));
}

// A convolution layer as a linear one (unfolding.h).
//
//   forward    X = the windows of x      y = act(s (X v^T) + b + residual)
//   backward   X once more               dX, dv, dg, db as of that layer; dx = the sum of dX where windows overlap
//
// Rows are in the order of a row of v. A 1x1 convolution of a channels_last map has X = x, in bfloat16, too. Other maps
// in bfloat16 are nothing beside the weights, and go as floats.
#include "cpu/layer/checks.h"
#include "cpu/layer/formats.h"
#include "cpu/layer/gains.h"
#include "cpu/ops/conv_routes.h"
#include "cpu/ops/linear_routes.h"
#include "cpu/ops/unfolding.h"

namespace wnfused::cpu {
namespace {

Tensor in_floats(const Tensor& t) { return as_dtype(t, ScalarType::Float); }

std::optional<Tensor> as_bfloat16(const std::optional<Tensor>& t) {
  return t ? std::optional(as_dtype(*t, ScalarType::BFloat16)) : std::nullopt;
}

// Whether x and y are the rows themselves.
bool lie_as_rows(const ConvCall& conv) {
  return conv.shape.is_pointwise() && is_rows(conv.x) && gives_channels_last(conv);
}

// A map whose memory is rows.
Tensor in_rows(const Tensor& map) {
  if (is_rows(map)) return map;
  Tensor copy = empty_map(sizes_of(map), true, map.scalar_type());
  torch::stable::copy_(copy, map);
  return copy;
}

LinearShape linear_shape(const ConvShape& shape) {
  return {shape.output_pixels(), shape.inputs * shape.taps(), shape.outputs};
}

// Such a layer, in the dtype of x.
Tensor conv_of_rows(const ConvCall& conv, const std::optional<Tensor>& residual, float* norms) {
  const LinearShape linear = linear_shape(conv.shape);
  const auto outputs = [&](const Tensor& map) { return matrix_of(map, linear.rows, linear.features); };
  const Tensor y = empty_output(conv, conv.x.scalar_type());
  check_residual(residual, y);
  std::optional<Tensor> added;
  if (residual) added = in_rows(*residual);
  run_linear({linear, matrix_of(conv.x, linear.rows, linear.inner), matrix_of(conv.v, linear.features, linear.inner),
              conv.gain, conv.bias, added ? std::optional(outputs(*added)) : std::nullopt, conv.activation, conv.slope,
              outputs(y), norms});
  return y;
}

LayerGradients conv_of_rows_backward(const ConvCall& conv, const Tensor& dy_given, const Tensor& y_given,
                                     const float* norms, const Needs& needs, float* dgain) {
  const LinearShape linear = linear_shape(conv.shape);
  const auto outputs = [&](const Tensor& map) { return matrix_of(map, linear.rows, linear.features); };
  const Tensor dy = in_rows(dy_given), y = conv.activation == Activation::kNone ? dy : in_rows(y_given);
  LinearGradient call{linear, matrix_of(conv.x, linear.rows, linear.inner),
                      matrix_of(conv.v, linear.features, linear.inner), conv.gain, norms, std::nullopt, std::nullopt,
                      dgain};
  LayerGradients made;
  std::optional<Rounded> bias_gradient;
  if (needs.x) {
    made.dx = empty_map(sizes_of(conv.x), true, conv.x.scalar_type());
    call.dx = matrix_of(*made.dx, linear.rows, linear.inner);
  }
  if (needs.v) {
    made.dv = empty_as(conv.v);
    call.dv = matrix_of(*made.dv, linear.features, linear.inner);
  }
  if (needs.bias) bias_gradient.emplace(std::vector<int64_t>{linear.features}, conv.v.scalar_type());
  const std::optional<Tensor> dz =
      run_linear_backward(call, outputs(dy), outputs(y), conv.activation, conv.slope, needs.residual,
                          bias_gradient ? bias_gradient->data() : nullptr);
  if (bias_gradient) made.dbias = bias_gradient->tensor();
  if (dz) made.dz = viewed_as(*dz, y);
  return made;
}

}  // namespace

std::optional<Tensor> unfolded_conv(const ConvCall& conv, const std::optional<Tensor>& residual, float* norms) {
  const ConvShape& shape = conv.shape;
  const Tensor &x = conv.x, &v = conv.v;
  if (is_bfloat16(x) && lie_as_rows(conv)) return conv_of_rows(conv, residual, norms);
  if (is_bfloat16(x)) {
    check_residual_dtype(residual, x);
    const std::optional<Tensor> added = residual ? std::optional(in_floats(*residual)) : std::nullopt;
    const Tensor wide = in_floats(x), weights = in_floats(v);
    const ConvCall call{shape, wide, weights, conv.gain, conv.bias, conv.at, conv.activation, conv.slope};
    return as_bfloat16(unfolded_conv(call, added, norms));
  }
  const Tensor y = empty_output(conv, ScalarType::Float);
  check_residual(residual, y);
  const ConvShape pixels = pointwise(y);
  const Tensor rows = unfolded(x, shape, order_of(v, shape.taps()));
  const LinearShape linear = linear_shape(shape);
  const LinearCall call{linear, rows, matrix_of(v, linear.features, linear.inner), conv.gain, conv.bias,
                        residual ? std::optional(rows_of(*residual)) : std::nullopt, conv.activation, conv.slope,
                        rows_to_fold(y, pixels), norms};
  run_linear(call);
  // A tap that meets no pixel takes no part in the vendor's sums; in these it is multiplied by 0.
  if (!shape.is_pointwise() && !all_finite(call.y)) return std::nullopt;
  fold(call.y, pixels, kPixels, y);
  return y;
}

std::optional<LayerGradients> unfolded_conv_backward(const ConvCall& conv, const Tensor& dy, const Tensor& y,
                                                     const float* norms, const Needs& needs, float* dgain) {
  const ConvShape& shape = conv.shape;
  const Tensor &x = conv.x, &v = conv.v;
  const bool masked = conv.activation != Activation::kNone;
  if (is_bfloat16(x) && lie_as_rows(conv)) return conv_of_rows_backward(conv, dy, y, norms, needs, dgain);
  if (is_bfloat16(x)) {
    const Tensor wide = in_floats(x), weights = in_floats(v), signs = masked ? in_floats(y) : y;
    const ConvCall call{shape, wide, weights, conv.gain, conv.bias, conv.at, conv.activation, conv.slope};
    std::optional<LayerGradients> found = unfolded_conv_backward(call, in_floats(dy), signs, norms, needs, dgain);
    if (!found) return std::nullopt;
    found->dx = as_bfloat16(found->dx);
    found->dz = as_bfloat16(found->dz);
    if (is_bfloat16(v)) {
      found->dv = as_bfloat16(found->dv);
      found->dbias = as_bfloat16(found->dbias);
    }
    return found;
  }
  const Tensor gradients = rows_of(dy);
  const auto are_finite = [&] { return all_finite(gradients) && all_finite(conv.gain, norms, shape.outputs); };
  if (!shape.is_pointwise() && !are_finite()) return std::nullopt;
  const Order order = order_of(v, shape.taps());
  LayerGradients made;
  std::optional<Tensor> rows, input;
  if (needs.x) {
    made.dx = empty_map(sizes_of(x), gives_channels_last(conv), ScalarType::Float);
    input = rows_to_fold(*made.dx, shape);
  }
  if (needs.v) rows = unfolded(x, shape, order);
  const LinearShape linear = linear_shape(shape);
  // Without dv, x is not read.
  LinearGradient call{linear, rows ? *rows : *input, matrix_of(v, linear.features, linear.inner), conv.gain, norms,
                      input, std::nullopt, dgain};
  float* dbias = nullptr;
  if (needs.v) {
    call.dv = empty_matrix(linear.features, linear.inner);
    made.dv = viewed_as(*call.dv, v);
  }
  if (needs.bias) {
    made.dbias = empty({shape.outputs}, ScalarType::Float);
    dbias = static_cast<float*>(made.dbias->mutable_data_ptr());
  }
  const std::optional<Tensor> dz = run_linear_backward(call, gradients, masked ? rows_of(y) : gradients,
                                                       conv.activation, conv.slope, needs.residual, dbias);
  if (needs.x) fold(*call.dx, shape, order, *made.dx);
  if (dz) {
    made.dz = empty_map(sizes_of(y), is_channels_last(y), ScalarType::Float);
    fold(*dz, pointwise(*made.dz), kPixels, *made.dz);
  }
  return made;
}

}  // namespace wnfused::cpu

#include "cpu/ops/conv_transpose_unfolded.h"

#include "cpu/layer/formats.h"
#include "cpu/layer/passes.h"
#include "cpu/ops/linear_routes.h"

namespace wnfused::cpu {
namespace {

LinearShape linear_of(const ConvShape& shape) {
  return {shape.output_pixels(), shape.inputs * shape.taps(), shape.outputs};
}

}  // namespace

bool unfolded_conv_transpose(const ConvCall& call, const std::optional<Tensor>& residual, const Tensor& y,
                             float* norms) {
  const ConvShape& shape = call.shape;
  const LinearShape linear = linear_of(shape);
  const std::vector<float> ones(std::max(shape.inputs, shape.outputs), 1.0f);
  if (call.gain) row_norms(call.v, norms, 0, linear.features);
  const float *gain = call.gain ? call.gain : ones.data(), *lengths = call.gain ? norms : ones.data();
  const Tensor x = rows_of(call.x), z = rows_to_fold(y, shape);
  // Without dv, x is not read: any matrix of its shape will do.
  const LinearGradient products{linear, z, matrix_of(call.v, linear.features, linear.inner), gain, lengths, z, {},
                                nullptr};
  run_linear_backward(products, x, x, Activation::kNone, 0.0f, false, nullptr);
  if (!all_finite(z)) return false;
  fold(z, shape, order_of(call.v, shape.taps()), y);
  if (!call.bias && !residual && call.activation == Activation::kNone) return true;
  const std::vector<float> zeros(call.bias ? 0 : shape.inputs, 0.0f);
  std::optional<Tensor> added;
  if (residual) added = laid_out_as(*residual, y);
  return run_epilogue(lines_of(y), {values_of(y), added ? values_of(*added) : Values{nullptr, false}, ones.data(),
                                    call.bias ? call.bias : zeros.data(), call.activation, call.slope});
}

bool unfolded_conv_transpose_backward(const ConvCall& call, const Tensor& dy_given, const Tensor& y,
                                      const float* norms, const ConvGradients& gradients) {
  const ConvShape& shape = call.shape;
  const LinearShape linear = linear_of(shape);
  const bool masked = call.activation != Activation::kNone;
  const Tensor signs = in_lines(masked ? y : dy_given), dy = laid_out_as(dy_given, signs);
  std::optional<Tensor> x;
  if (gradients.dv) x = rows_of(call.x);
  if ((x && !all_finite(*x)) || !all_finite(call.gain, norms, linear.features)) return false;
  if (!call.gain && gradients.dx && !all_finite(call.v)) return false;
  const bool given = gradients.dz && same_layout(*gradients.dz, dy);
  const Tensor dz = masked_gradient(dy, signs, given ? gradients.dz : std::nullopt, call.activation, call.slope,
                                    gradients.dbias);
  if (!all_finite(dz)) return false;
  const Tensor windows = unfolded(dz, shape, order_of(call.v, shape.taps()));
  const Tensor v = matrix_of(call.v, linear.features, linear.inner);
  if (gradients.dx) {
    const ConvShape pixels = pointwise(*gradients.dx);
    const Tensor rows = rows_to_fold(*gradients.dx, pixels);
    if (call.gain) {
      std::vector<float> again(linear.features);
      run_linear({linear, windows, v, call.gain, nullptr, {}, Activation::kNone, 0.0f, rows, again.data()});
    } else {
      mm(rows, windows, matrix(call.v, 0, linear.inner, linear.features, 1, linear.inner));
    }
    fold(rows, pixels, kPixels, *gradients.dx);
  }
  if (gradients.dv && !call.gain) {
    mm(matrix_of(*gradients.dv, linear.features, linear.inner),
       matrix(*x, 0, linear.features, linear.rows, 1, linear.features), windows);
  } else if (gradients.dv) {
    const LinearGradient products{linear, windows, v, call.gain, norms, {},
                                  matrix_of(*gradients.dv, linear.features, linear.inner), gradients.dgain};
    run_linear_backward(products, *x, *x, Activation::kNone, 0.0f, false, nullptr);
  }
  if (gradients.dz && !same_layout(*gradients.dz, dy)) {
    Tensor target = *gradients.dz;
    torch::stable::copy_(target, dz);
  }
  return true;
}

}  // namespace wnfused::cpu

// linear: y = act(s (x v^T) + b + residual), x [M, K], v [N, K], and its gradients, by the route that suits the shape
// (linear_routes.h).
#include <torch/csrc/stable/library.h>

#include "../ops.h"
#include "linear_routes.h"

namespace wnfused {
namespace {

using namespace cpu;

Tensor contiguous_or_self(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

LinearShape shape_of(const Tensor& x, const Tensor& v) {
  STD_TORCH_CHECK(v.dim() == 2 && x.dim() > 0 && x.size(-1) == v.size(1), "linear: x must end in v's in_features");
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return {rows, v.size(1), v.size(0)};
}

// The products of this library for such a layer, or null.
const LinearKernels* products_for(const LinearShape& shape, const Tensor& x) {
  // One row of v would fill one lane of a vector: a matrix by a vector is the vendor's.
  const bool ours = !shape.is_empty() && (shape.features > 1 || is_bfloat16(x));
  return ours ? linear_kernels(is_bfloat16(x), shape.rows) : nullptr;
}

void check_output(const Tensor& t, const char* name, const LinearShape& shape, const Tensor& x) {
  bool fits = t.scalar_type() == x.scalar_type() && t.dim() == x.dim() && t.size(-1) == shape.features;
  for (int64_t d = 0; fits && d + 1 < x.dim(); ++d) fits = t.size(d) == x.size(d);
  STD_TORCH_CHECK(fits, "linear: ", name, " must have the dtype of x and the shape of the output");
}

// What the pass over dy leaves for the products: dz, and s dz where those of the vendor take it. dz is left out where
// `scaled` stands for it and nobody else asks.
struct Masked {
  Gradient dz, scaled;
  bool invertible;
};

Masked mask(const LinearGradient& call, const Tensor& dy, const Tensor& y, Activation activation, float slope,
            bool scale_dz, bool keep_dz, float* dbias) {
  const LinearShape& shape = call.shape;
  const bool masked = activation != Activation::kNone;
  const std::vector<float> scale = scale_dz ? scales_of(call.gain, call.norms, shape.features) : std::vector<float>();
  Masked made{dy, {}, scale_dz && are_invertible(scale, call.norms)};
  if (scale_dz) made.scaled = empty_as(dy);
  if (masked && made.invertible && !keep_dz) made.dz.reset();
  else if (masked) made.dz = empty_as(dy);
  if (masked || scale_dz || dbias) {
    const Values nothing{nullptr, call.is_half()};
    run_mask(lines_of(shape),
             {values_of(dy), values_of(y), masked && made.dz ? values_of(*made.dz) : nothing,
              scale_dz ? values_of(*made.scaled) : nothing, scale.data(), nullptr, activation, slope},
             dbias);
  }
  return made;
}

}  // namespace

std::tuple<Tensor, Tensor> linear(
    const Tensor& x, const Tensor& v, const Tensor& g, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual, int64_t activation, double slope) {
  check_parameters(x, v, g, bias);
  check_activation(activation, slope);
  const LinearShape shape = shape_of(x, v);
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = shape.features;
  const Tensor y = empty(sizes, x.scalar_type());
  check_residual(residual, y);
  const Tensor norm = empty({shape.features}, ScalarType::Float);
  std::vector<float> held_gain, held_bias;
  LinearCall call{shape, contiguous_or_self(x), contiguous_or_self(v), floats_of(g, held_gain),
                  bias ? floats_of(*bias, held_bias) : nullptr, std::nullopt, static_cast<Activation>(activation),
                  static_cast<float>(slope), y, static_cast<float*>(norm.mutable_data_ptr())};
  if (residual) call.residual = contiguous_or_self(*residual);
  const LinearKernels* products = products_for(shape, x);
  const bool small = is_small(call, products);
  if (small && small_linear(call, products)) return {y, norm};
  if (!small && are_pixels(shape, x, v, products) && linear_by_pixels(call)) return {y, norm};
  if (products) linear_by_products(*products, call);
  else if (small) vendor_linear_by_weight(call);
  else vendor_linear(call);
  return {y, norm};
}

std::tuple<Gradient, Gradient, Gradient, Gradient, Gradient> linear_backward(
    const Tensor& dy_given, const Tensor& y_given, const Tensor& x, const Tensor& v, const Tensor& g,
    const Tensor& norm, int64_t needs, int64_t activation_given, double slope_given) {
  const bool need_x = needs & 1, need_v = needs & 2, need_bias = needs & 4, need_residual = needs & 8;
  check_parameters(x, v, g, std::nullopt);
  check_activation(activation_given, slope_given);
  const Activation activation = static_cast<Activation>(activation_given);
  const float slope = static_cast<float>(slope_given);
  const LinearShape shape = shape_of(x, v);
  const bool masked = activation != Activation::kNone;
  check_output(dy_given, "dy", shape, x);
  if (masked) check_output(y_given, "y", shape, x);
  check_norm(norm, shape.features);
  const Tensor dy = contiguous_or_self(dy_given), y = masked ? contiguous_or_self(y_given) : dy;
  std::vector<float> held;
  LinearGradient call{shape, contiguous_or_self(x), contiguous_or_self(v), floats_of(g, held), entries<float>(norm),
                      std::nullopt, std::nullopt, nullptr};
  const LinearKernels* products = products_for(shape, x);
  const bool small = is_small(call, products), vendor = !small && !products;
  std::optional<Rounded> bias_gradient, gain_gradient;
  float* dbias = nullptr;
  if (need_bias) dbias = bias_gradient.emplace(std::vector<int64_t>{shape.features}, v.scalar_type()).data();
  if (need_x) call.dx = empty_as(call.x);
  if (need_v) {
    call.dv = empty_as(call.v);
    call.dgain = gain_gradient.emplace(sizes_of(g), g.scalar_type()).data();
  }
  const bool keep_dz = need_residual && masked;
  const auto found = [&](const Gradient& dz) {
    return std::tuple(call.dx, call.dv, need_v ? Gradient(gain_gradient->tensor()) : Gradient(),
                      need_bias ? Gradient(bias_gradient->tensor()) : Gradient(), keep_dz ? dz : Gradient());
  };
  // A bias gradient without that of the weight would need a pass of its own.
  const bool together = (need_x || need_v) && (need_v || !need_bias);
  if (!small && together && are_pixels(shape, x, v, products)) {
    const Gradient dz = keep_dz ? Gradient(empty_as(dy)) : Gradient();
    if (linear_by_pixels_backward(call, dy, y, activation, slope, dz, dbias)) return found(dz);
  }
  // The vendor's products take s dz, unless dy can be taken as it is and the scaled weight is the smaller of the two.
  const bool scale_dz = vendor && (need_x || need_v) && is_bfloat16(x) == is_bfloat16(v) &&
                        (masked || shape.rows <= shape.inner);
  const Masked made = mask(call, dy, y, activation, slope, scale_dz, need_residual, dbias);
  if (need_x || need_v) {
    if (small) small_linear_backward(call, *made.dz);
    else if (products) linear_by_products_backward(*products, call, *made.dz);
    else vendor_linear_backward(call, made.dz, made.scaled, made.invertible);
  }
  return found(made.dz);
}

}  // namespace wnfused

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CPU, library) {
  library.impl("linear", TORCH_BOX(&wnfused::linear));
  library.impl("linear_backward", TORCH_BOX(&wnfused::linear_backward));
}

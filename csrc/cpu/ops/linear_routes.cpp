// The choice among the ways through a linear layer (linear_routes.h), and the pass over dy before the products.
#include "cpu/ops/linear_routes.h"

#include "cpu/layer/formats.h"
#include "cpu/layer/gains.h"
#include "cpu/layer/passes.h"

namespace wnfused::cpu {
namespace {

// What the pass over dy leaves for the products: dz, and s dz where those of the vendor take it. dz is left out where
// `scaled` stands for it and nobody else asks.
struct Masked {
  std::optional<Tensor> dz, scaled;
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

// Whether oneDNN 3, with AMX, reads behind a row of x: what stands there, be it infinite, it multiplies by zero.
bool vendor_is_wrong(const LinearCall& call) {
  constexpr int64_t kDepth = 32, kRows = 16;
  return call.is_half() && call.shape.inner % kDepth != 0 && call.shape.rows > kRows;
}

// The layer in float32.
void widened_linear(const LinearCall& call) {
  LinearCall wide = call;
  wide.x = as_dtype(call.x, ScalarType::Float);
  wide.v = as_dtype(call.v, ScalarType::Float);
  if (call.residual) wide.residual = as_dtype(*call.residual, ScalarType::Float);
  wide.y = empty_as(call.y, ScalarType::Float);
  run_linear(wide);
  Tensor y = call.y;
  torch::stable::copy_(y, wide.y);
}

}  // namespace

const LinearKernels* products_for(const LinearShape& shape, const Tensor& x) {
  // One row of v would fill one lane of a vector: a matrix by a vector is the vendor's.
  const bool ours = !shape.is_empty() && (shape.features > 1 || is_bfloat16(x));
  return ours ? linear_kernels(is_bfloat16(x), shape.rows) : nullptr;
}

const LinearKernels* split_products_for(const LinearShape& shape, const Tensor& x) {
  // Splitting costs an entry of an operand what a few products with it do (bench/NOTES.md).
  constexpr int64_t kLeastRows = 16, kLeastWidth = 256;
  const bool worth = shape.rows >= kLeastRows && std::min(shape.inner, shape.features) >= kLeastWidth;
  return worth && x.scalar_type() == ScalarType::Float ? split_linear_kernels() : nullptr;
}

void run_linear(const LinearCall& call) {
  if (are_few(call) && linear_by_few(call)) return;
  const LinearKernels* products = products_for(call.shape, call.x);
  const bool small = is_small(call, products);
  const LinearKernels* split = small ? nullptr : split_products_for(call.shape, call.x);
  const bool panels = !split && are_panels(call, small);
  if (panels && linear_by_panels(call)) return;
  if (!panels && small && small_linear(call, products)) return;
  if (split && linear_by_products(*split, call)) return;
  if (!small && are_pixels(call.shape, call.x, call.v, products, false) && linear_by_pixels(call)) return;
  if (products) linear_by_products(*products, call);
  else if (vendor_is_wrong(call)) widened_linear(call);
  else if (small) vendor_linear_by_weight(call);
  else vendor_linear(call);
}

std::optional<Tensor> run_linear_backward(const LinearGradient& call, const Tensor& dy, const Tensor& y,
                                          Activation activation, float slope, bool keep_dz, float* dbias) {
  const bool masked = activation != Activation::kNone, asked = call.dx || call.dv;
  keep_dz = keep_dz && masked;
  if (asked && are_few(call)) {
    std::optional<Tensor> dz;
    if (keep_dz) dz = empty_as(dy);
    linear_by_few_backward(call, dy, y, activation, slope, dz, dbias);
    return dz;
  }
  const LinearKernels* products = products_for(call.shape, call.x);
  const bool small = is_small(call, products);
  const LinearKernels* split = small ? nullptr : split_products_for(call.shape, call.x);
  const bool panels = !small && !split && are_panels(call, products);
  const bool vendor = !small && !products && !split && !panels;
  // A bias gradient without that of the weight would need a pass of its own.
  const bool together = asked && (call.dv || !dbias);
  if (!small && !split && !panels && together && are_pixels(call.shape, call.x, call.v, products, true)) {
    std::optional<Tensor> dz;
    if (keep_dz) dz = empty_as(dy);
    if (linear_by_pixels_backward(call, dy, y, activation, slope, dz, dbias)) return dz;
  }
  // The vendor's products take s dz, unless dy can be taken as it is and the scaled weight is the smaller of the two.
  const bool scale_dz = vendor && asked && is_bfloat16(call.x) == is_bfloat16(call.v) &&
                        (masked || call.shape.rows <= call.shape.inner);
  const Masked made = mask(call, dy, y, activation, slope, scale_dz, keep_dz, dbias);
  if (asked) {
    if (small) small_linear_backward(call, *made.dz);
    else if (panels) linear_by_panels_backward(call, *made.dz);
    else if (split && linear_by_products_backward(*split, call, *made.dz)) return keep_dz ? made.dz : std::nullopt;
    else if (products) linear_by_products_backward(*products, call, *made.dz);
    else vendor_linear_backward(call, made.dz, made.scaled, made.invertible);
  }
  return keep_dz ? made.dz : std::nullopt;
}

}  // namespace wnfused::cpu

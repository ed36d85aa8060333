// A linear layer as a 1x1 convolution (conv_layer.h): forward only v is packed, products read x where it is and write y
// where it goes.
#include "cpu/conv_layer/pair_layer.h"
#include "cpu/machine/isa.h"
#include "cpu/ops/linear_routes.h"

namespace wnfused::cpu {
namespace {

ConvShape pixels_of(const LinearShape& shape) {
  constexpr Triple kOne{1, 1, 1};
  return {1, shape.inner, shape.features, {1, 1, shape.rows}, kOne, kOne, {0, 0, 0}, kOne, 1};
}

Method method_for(const Tensor& x) { return is_bfloat16(x) ? Method::kPairs : Method::kDirect; }

}  // namespace

// Measured beside the products of AVX-512 (bench/NOTES.md): how many entries of v one row of x makes worth packing. In
// bfloat16 on tiles, beside the vendor's: small layers, and of larger ones, above all those whose v is fp32, which the
// vendor is given rounded, few rows of x; and rows of x that the vendor would read beyond (linear_routes.cpp).
bool are_pixels(const LinearShape& shape, const Tensor& x, const Tensor& v, const LinearKernels* products,
                bool backward) {
  constexpr int64_t kForward = 512, kBackward = 160;
  if (is_bfloat16(x)) {
    constexpr int64_t kSmall = 1 << 16, kMedium = 1 << 18, kFewRows = 64, kVendorDepth = 32;
    if (getenv("NOPIX")) return false;
    if (shape.is_empty() || !pair_window_kernels() || !is_fused_dtype(v)) return false;
    const int64_t weights = shape.inner * shape.features;
    const bool rounded = v.scalar_type() == ScalarType::Float, medium = weights <= kMedium;
    const bool few = shape.rows <= kFewRows && (backward ? rounded && medium : rounded || medium);
    return weights <= kSmall || few || shape.inner % kVendorDepth != 0;
  }
  const bool floats = x.scalar_type() == ScalarType::Float && v.scalar_type() == ScalarType::Float;
  return products && active_isa() == Isa::kAvx512 && floats &&
         shape.inner * shape.features <= (backward ? kBackward : kForward) * shape.rows;
}

bool linear_by_pixels(const LinearCall& call) {
  const ConvLayer layer{pixels_of(call.shape), false,     method_for(call.x), call.x,     call.v,
                        call.gain,             call.bias, call.activation,    call.slope, true};
  return run_conv_layer(layer, call.residual, call.y, call.norms);
}

bool linear_by_pixels_backward(const LinearGradient& call, const Tensor& dy, const Tensor& y, Activation activation,
                               float slope, const std::optional<Tensor>& dz, float* dbias) {
  const ConvLayer layer{pixels_of(call.shape), false,   method_for(call.x), call.x, call.v,
                        call.gain,             nullptr, activation,         slope,  true};
  return run_conv_layer_backward(layer, dy, y, call.norms, {call.dx, call.dv, dz, call.dgain, dbias});
}

}  // namespace wnfused::cpu

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

// Measured beside the products of AVX-512 and those of tiles (bench/NOTES.md): how many entries of v one row of x makes
// worth packing. The forward of floats turns rows of v instead.
bool are_pixels(const LinearShape& shape, const Tensor& x, const Tensor& v, const LinearKernels* products,
                bool backward) {
  constexpr int64_t kFloats = 160, kPairs = 64;
  if (!products || shape.is_empty()) return false;
  const int64_t weights = shape.inner * shape.features;
  if (is_bfloat16(x)) return has_tiles() && is_fused_dtype(v) && !backward && weights <= kPairs * shape.rows;
  const bool floats = x.scalar_type() == ScalarType::Float && v.scalar_type() == ScalarType::Float;
  return active_isa() == Isa::kAvx512 && floats && backward && weights <= kFloats * shape.rows;
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

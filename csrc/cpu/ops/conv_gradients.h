// The tensors that the kernels of conv_layer/ fill with a layer's gradients.
#pragma once

#include "cpu/conv_layer/conv_layer.h"
#include "cpu/layer/formats.h"
#include "cpu/ops/conv_call.h"

namespace wnfused::cpu {

// rows: v as the kernels are given it.
inline LayerGradients empty_gradients(const ConvCall& conv, const Tensor& rows, const Tensor& y,
                                      const Needs& needs) {
  LayerGradients made;
  const ScalarType dtype = conv.x.scalar_type();
  if (needs.x) made.dx = empty_map(sizes_of(conv.x), gives_channels_last(conv), dtype);
  if (needs.v) made.dv = empty_as(rows);
  if (needs.bias) made.dbias = empty({conv.v.size(0)}, ScalarType::Float);
  if (needs.residual && conv.activation != Activation::kNone)
    made.dz = empty_map(sizes_of(y), is_channels_last(y), dtype);
  return made;
}

inline ConvGradients to_fill(const LayerGradients& made, float* dgain) {
  float* dbias = made.dbias ? static_cast<float*>(made.dbias->mutable_data_ptr()) : nullptr;
  return {made.dx, made.dv, made.dz, dgain, dbias};
}

// Those of the parameters as v is.
inline LayerGradients in_format_of(const Tensor& v, LayerGradients made) {
  if (made.dv) made.dv = laid_out_as(as_dtype(*made.dv, v.scalar_type()), v);
  if (made.dbias) made.dbias = as_dtype(*made.dbias, v.scalar_type());
  return made;
}

}  // namespace wnfused::cpu

// A call of a convolution layer, y = act(s conv(x, v) + b + residual), and its gradients, as every way through it is
// handed them (choice.h).
#pragma once

#include <optional>

#include "cpu/choice/choice.h"
#include "cpu/layer/formats.h"
#include "cpu/layer/tensor.h"
#include "cpu/ops/conv_extents.h"

namespace wnfused::cpu {

struct Sliding {
  const Extents &stride, &padding, &dilation;
  int64_t groups;
  const Extents* output_padding = nullptr;  // of a transposed convolution

  bool is_transposed() const { return output_padding != nullptr; }
  Extents output_paddings() const { return output_padding ? *output_padding : Extents(stride.size(), 0); }
};

void check_window(const Tensor& x, const Tensor& v, const Sliding& at);

// The size of a layer's output along dim d; nothing where there is no output.
std::optional<int64_t> output_extent(const Tensor& x, const Tensor& v, const Sliding& at, int64_t d);

// The same of a transposed one, whatever comes out.
int64_t transposed_extent(const Tensor& x, const Tensor& v, const Sliding& at, int64_t d);

// The layer in numbers. One that cannot be is not sound.
ConvShape conv_shape(const Tensor& x, const Tensor& v, const Sliding& at);

// A gradient, or an output, of a layer over any number of dims.
void check_output(const Tensor& t, const char* name, const Tensor& x, const Tensor& v, const Sliding& at);

// One layer: v with dense rows; gain null for a plain convolution, w = v. bias may be null. A transposed layer's shape
// is that of the convolution from y's map to x's whose data gradient it is. Where no kernel of this library describes
// the layer, its shape is not sound, and the vendor, who does not look at it, takes it.
struct ConvCall {
  ConvShape shape;
  const Tensor &x, &v;
  const float *gain, *bias;
  const Sliding& at;
  Activation activation;
  float slope;
};

// The format that torch gives y and dx.
inline bool gives_channels_last(const ConvCall& conv) {
  return suggests_channels_last(conv.x) || suggests_channels_last(conv.v);
}

inline Tensor empty_output(const ConvCall& conv, ScalarType dtype) {
  const ConvShape& shape = conv.shape;
  return empty_map(map_sizes(shape.images, shape.outputs, shape.output_size(), conv.v.dim()), gives_channels_last(conv),
                   dtype);
}

ConvTraits traits_of(const ConvCall& conv);

// dgain beside dv. dz is that of a layer without activation.
struct LayerGradients {
  std::optional<Tensor> dx, dv, dbias, dz;
};

}  // namespace wnfused::cpu

// A convolution layer's tensors on the kernels of conv_layer.h, or nothing where these leave it to the vendor's.
#pragma once

#include <optional>
#include <vector>

#include "conv_layer.h"
#include "layer_tensor.h"

namespace wnfused::cpu {

using Extents = std::vector<int64_t>;

struct Sliding {
  const Extents &stride, &padding, &dilation;
  int64_t groups;
};

void check_window(const Tensor& x, const Tensor& v, const Sliding& at);

// A gradient, or an output, of a layer over any number of dims.
void check_output(const Tensor& t, const char* name, const Tensor& x, const Tensor& v, const Sliding& at);

// gain null: a plain convolution, w = v. bias may be null.
struct OwnConv {
  const Tensor &x, &v;
  const float *gain, *bias;
  const Sliding& at;
  Activation activation;
  float slope;
};

// y, and the norms unless the convolution is plain. Nothing where it, or a value that is not finite, is the vendor's.
std::optional<Tensor> own_conv(const OwnConv& conv, const std::optional<Tensor>& residual, float* norms);

struct OwnGradients {
  std::optional<Tensor> dx, dv, dbias, dz;
};

// What `needs` asks for: 1 dx, 2 dv and dgain, 4 dbias, 8 dz. norms and dgain are not touched where gain is null.
std::optional<OwnGradients> own_conv_backward(const OwnConv& conv, const Tensor& dy, const Tensor& y,
                                              const float* norms, int64_t needs, float* dgain);

}  // namespace wnfused::cpu

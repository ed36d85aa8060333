// The ways through a convolution layer, y = act(s conv(x, v) + b + residual), and what each is handed. Who is asked for
// a layer (conv.cpp, plain_conv.cpp) tries them in this order:
//
//      planes     1x1 layers of maps in NCHW, as products of v with each image
//      strips     few channels on a side, or in a group: vectorised over pixels (strip_layer.h)
//      unfolded   a linear layer whose rows are the windows of the map: wide layers on few pixels
//      own        kernels of this library (conv_layer.h), where they are faster
//      vendor     the vendor's convolution, ours being the norm and the passes beside it: 1 to 3 dims, any type
//
// The first two take float32; the next two, bfloat16, too, which they multiply as float32 or as pairs (pair_layer.h).
#pragma once

#include <optional>
#include <vector>

#include "cpu/conv_layer/conv_layer.h"
#include "cpu/layer/formats.h"
#include "cpu/layer/tensor.h"
#include "cpu/ops/conv_extents.h"
#include "cpu/ops/kept_banks.h"

namespace wnfused::cpu {

struct Sliding {
  const Extents &stride, &padding, &dilation;
  int64_t groups;
};

void check_window(const Tensor& x, const Tensor& v, const Sliding& at);

// The size of a layer's output along dim d; nothing where there is no output.
std::optional<int64_t> output_extent(const Tensor& x, const Tensor& v, const Sliding& at, int64_t d);

// The layer as conv_layer.h describes it; nothing where that cannot describe it.
std::optional<ConvShape> conv_shape(const Tensor& x, const Tensor& v, const Sliding& at);

// A gradient, or an output, of a layer over any number of dims.
void check_output(const Tensor& t, const char* name, const Tensor& x, const Tensor& v, const Sliding& at);

// One layer: v with dense rows; gain null for a plain convolution, w = v, which only `own` takes. bias may be null.
struct ConvCall {
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

// Which gradients are asked for, by the bits of the ops' `needs`.
struct ConvNeeds {
  bool x, v, bias, residual;

  explicit ConvNeeds(int64_t needs) : x(needs & 1), v(needs & 2), bias(needs & 4), residual(needs & 8) {}
};

// dgain beside dv. dz is that of a layer without activation.
struct LayerGradients {
  std::optional<Tensor> dx, dv, dbias, dz;
};

// y and the norms. Nothing where another way is faster, or a value is not finite.
std::optional<Tensor> unfolded_conv(const ConvCall& conv, const std::optional<Tensor>& residual, float* norms);
std::optional<LayerGradients> unfolded_conv_backward(const ConvCall& conv, const Tensor& dy, const Tensor& y,
                                                     const float* norms, const ConvNeeds& needs, float* dgain);

// The same. outdo_banks: whether this way is the fastest, even beside reading kept banks.
bool planes_outdo_banks(const ConvCall& conv);
std::optional<Tensor> planes_conv(const ConvCall& conv, const std::optional<Tensor>& residual, float* norms);
std::optional<LayerGradients> planes_conv_backward(const ConvCall& conv, const Tensor& dy, const Tensor& y,
                                                   const float* norms, const ConvNeeds& needs, float* dgain);
bool strips_outdo_banks(const ConvCall& conv);
std::optional<Tensor> strips_conv(const ConvCall& conv, const std::optional<Tensor>& residual, float* norms);
std::optional<LayerGradients> strips_conv_backward(const ConvCall& conv, const Tensor& dy, const Tensor& y,
                                                   const float* norms, const ConvNeeds& needs, float* dgain);

// y, and the norms unless the convolution is plain. Nothing where the vendor is faster, or a value is not finite.
// banks: see kept_banks.h; with them nothing, too, where none is worth keeping.
std::optional<Tensor> own_conv(const ConvCall& conv, const std::optional<Tensor>& residual, float* norms,
                               KeptBanks* banks = nullptr);

// norms and dgain are not touched where the convolution is plain.
std::optional<LayerGradients> own_conv_backward(const ConvCall& conv, const Tensor& dy, const Tensor& y,
                                                const float* norms, const ConvNeeds& needs, float* dgain);

// bias: conv.bias as it was given. dbias has the dtype of v.
Tensor vendor_conv(const ConvCall& conv, const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                   float* norms);
LayerGradients vendor_conv_backward(const ConvCall& conv, const Tensor& dy, const Tensor& y, const float* norms,
                                    const ConvNeeds& needs, float* dgain);

}  // namespace wnfused::cpu

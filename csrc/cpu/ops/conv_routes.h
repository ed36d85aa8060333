// The ways through a convolution layer, once they are chosen (choice.h). Those that may give nothing do so where a
// value is not finite, or memory would not do: then nothing of it counts.
#pragma once

#include "cpu/ops/conv_call.h"
#include "cpu/ops/kept_banks.h"

namespace wnfused::cpu {

// y, and the norms.
Tensor planes_conv(const ConvCall& conv, const std::optional<Tensor>& residual, float* norms);
LayerGradients planes_conv_backward(const ConvCall& conv, const Tensor& dy, const Tensor& y, const float* norms,
                                    const Needs& needs, float* dgain);

std::optional<Tensor> strips_conv(const ConvCall& conv, const std::optional<Tensor>& residual, float* norms);
std::optional<LayerGradients> strips_conv_backward(const ConvCall& conv, const Tensor& dy, const Tensor& y,
                                                   const float* norms, const Needs& needs, float* dgain);

std::optional<Tensor> unfolded_conv(const ConvCall& conv, const std::optional<Tensor>& residual, float* norms);
std::optional<LayerGradients> unfolded_conv_backward(const ConvCall& conv, const Tensor& dy, const Tensor& y,
                                                     const float* norms, const Needs& needs, float* dgain);

// norms and dgain are not touched where the convolution is plain. banks may be null: see kept_banks.h.
std::optional<Tensor> own_conv(const ConvCall& conv, Method method, const std::optional<Tensor>& residual, float* norms,
                               KeptBanks* banks = nullptr);
std::optional<LayerGradients> own_conv_backward(const ConvCall& conv, Method method, const Tensor& dy, const Tensor& y,
                                                const float* norms, const Needs& needs, float* dgain);

// bias: conv.bias as it was given. dbias has the dtype of v.
Tensor vendor_conv(const ConvCall& conv, const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                   float* norms);
LayerGradients vendor_conv_backward(const ConvCall& conv, const Tensor& dy, const Tensor& y, const float* norms,
                                    const Needs& needs, float* dgain);

}  // namespace wnfused::cpu

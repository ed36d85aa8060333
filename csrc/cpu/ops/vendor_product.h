// torch's convolution and its gradients: where the vendor's own would be wrong, in another format or a wider dtype.
#pragma once

#include <optional>
#include <utility>

#include "cpu/ops/conv_call.h"

namespace wnfused::cpu {

Tensor vendor_product(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const Sliding& at);

// (dx, dw), each undefined unless asked for.
std::pair<Tensor, Tensor> vendor_product_backward(const Tensor& dz, const Tensor& x, const Tensor& w, const Sliding& at,
                                                  bool input, bool weight);

}  // namespace wnfused::cpu

// Linear layers of few samples on CUDA tensors: one launch forward and one backward, of the library's own kernels
// (cuda/small_linear.h), where the vendor's way takes three and four.
#pragma once

#include "autograd/vendor.h"

namespace wnfused::small_linear {

using at::Tensor;
using vendor::Outputs;

// Inputs of a dtype. The backward asks again: between them `use` may have been called.
bool takes(at::ScalarType dtype, int64_t samples, const Tensor& v);

// Whether any are taken, in this process; what it was before.
bool use(bool on);

// y [samples, rows]. No weight is made.
Outputs forward(
    const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias, const Optional& residual,
    bool activates, double slope);

// By the gradient dy [samples, rows], which is masked here where an activation is to be.
Gradients backward(
    const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& v, const Tensor& g, const Tensor& norm,
    const Needs& needs, bool activates, double slope);

}  // namespace wnfused::small_linear

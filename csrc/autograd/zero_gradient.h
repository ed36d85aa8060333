// Zeros in the place of the gradient of a layer's output: what an activation has by its output where a gradient by the
// input is differentiated once more. Where nothing is added to them, the layer that they reach hands zeros on, and
// computes nothing: the penalty of a critic would go back through all its layers with zeros otherwise.
#pragma once

#include <ATen/ATen.h>

namespace wnfused {

// What the node that is running hands on by one of its edges, in float32 on the CPU: zeros, all those of one backward
// one number in memory; for a leaf, whose .grad will be written to, zeros of its own. Undefined where zeros are on
// their way there already: their sum would be zeros like anybody's.
at::Tensor zero_gradient(size_t edge, const at::Tensor& like);

// Whether dy is such a one of this backward, and nothing was added to it. Zeros of anybody else are multiplied, for
// 0 * inf is NaN.
bool is_zero_gradient(const at::Tensor& dy);

// Whether dy may be those that wnfused/ops/_input_gradient.py hands on. It is to be asked.
bool may_be_zero_gradient_of_python(const at::Tensor& dy);

}  // namespace wnfused

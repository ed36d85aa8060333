// One declaration for each kernel of torch.ops.wnfused_native. The schemas stand in wnfused/backends/native.py,
// the mathematics in wnfused/reference.py.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <tuple>

namespace wnfused {

using torch::stable::Tensor;

// w_i = g_i v_i / ||v_i|| and the row norms. v: contiguous, or rows along dim 0 each in one run of memory; g: one
// contiguous number a row, in v's dtype; dim: the dim that numbers the rows, -1 for one row over the whole tensor.
std::tuple<Tensor, Tensor> weight_norm(const Tensor& v, const Tensor& g, int64_t dim);

// dv, dg from dw, which has v's strides and dtype; dg has g's shape.
std::tuple<Tensor, Tensor> weight_norm_backward(
    const Tensor& dw, const Tensor& v, const Tensor& g, const Tensor& norm, int64_t dim);

}  // namespace wnfused

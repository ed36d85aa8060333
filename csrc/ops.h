// One declaration for each kernel of torch.ops.wnfused_native. The schemas stand in wnfused/backends/native_schemas.py,
// the mathematics in wnfused/reference.py.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace wnfused {

using torch::stable::Tensor;

// w_i = g_i v_i / ||v_i|| and the row norms. g: one number a row; dim: the dim that numbers the rows, -1 for one row
// over the whole tensor. w has the strides of v where that is dense.
std::tuple<Tensor, Tensor> weight_norm(const Tensor& v, const Tensor& g, int64_t dim);

// dv, dg from dw; dg has g's shape.
std::tuple<Tensor, Tensor> weight_norm_backward(
    const Tensor& dw, const Tensor& v, const Tensor& g, const Tensor& norm, int64_t dim);

// The same of many tensors, of mixed shapes and dtypes: w (none unless `weights`), norms and scales g / ||v||.
std::tuple<std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>> weight_norm_many(
    const std::vector<Tensor>& v, const std::vector<Tensor>& g, int64_t dim, bool weights);
std::tuple<std::vector<Tensor>, std::vector<Tensor>> weight_norm_many_backward(
    const std::vector<Tensor>& dw, const std::vector<Tensor>& v, const std::vector<Tensor>& g,
    const std::vector<Tensor>& norm, int64_t dim);

// y and the row norms of a layer normalised along dim 0; activation: 0 none, 1 ReLU, 2 leaky ReLU. x float32, or
// bfloat16 with parameters of either; bias and residual as in the reference.
std::tuple<Tensor, Tensor> linear(
    const Tensor& x, const Tensor& v, const Tensor& g, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual, int64_t activation, double slope);
std::tuple<Tensor, Tensor> conv(
    const Tensor& x, const Tensor& v, const Tensor& g, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual, const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
    const std::vector<int64_t>& dilation, int64_t groups, int64_t activation, double slope);

// The same of a layer whose weights do not change: y, and a bank if it packed one. known: the banks that earlier calls
// gave, of these very weights; no memory of theirs is written.
std::tuple<Tensor, std::optional<Tensor>> kept_conv(
    const Tensor& x, const Tensor& v, const Tensor& g, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual, const std::vector<Tensor>& known, const std::vector<int64_t>& stride,
    const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation, int64_t groups, int64_t activation,
    double slope);

// dx, dv, dg, dbias, dz; needs: see needs.h; dz is absent too where it would be dy.
using Gradient = std::optional<Tensor>;
std::tuple<Gradient, Gradient, Gradient, Gradient, Gradient> linear_backward(
    const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& v, const Tensor& g, const Tensor& norm,
    int64_t needs, int64_t activation, double slope);
std::tuple<Gradient, Gradient, Gradient, Gradient, Gradient> conv_backward(
    const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& v, const Tensor& g, const Tensor& norm,
    int64_t needs, const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
    const std::vector<int64_t>& dilation, int64_t groups, int64_t activation, double slope);

// Rows of v along x's channels.
std::tuple<Tensor, Tensor> conv_transpose(
    const Tensor& x, const Tensor& v, const Tensor& g, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual, const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
    const std::vector<int64_t>& dilation, const std::vector<int64_t>& output_padding, int64_t groups,
    int64_t activation, double slope);
std::tuple<Tensor, std::optional<Tensor>> kept_conv_transpose(
    const Tensor& x, const Tensor& v, const Tensor& g, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual, const std::vector<Tensor>& known, const std::vector<int64_t>& stride,
    const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation,
    const std::vector<int64_t>& output_padding, int64_t groups, int64_t activation, double slope);
std::tuple<Gradient, Gradient, Gradient, Gradient, Gradient> conv_transpose_backward(
    const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& v, const Tensor& g, const Tensor& norm,
    int64_t needs, const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
    const std::vector<int64_t>& dilation, const std::vector<int64_t>& output_padding, int64_t groups,
    int64_t activation, double slope);

// The same of a convolution with a weight that is given as it is: y; dx, dw, dbias, dz. Nothing, or false, where the
// vendor is as fast, or no kernel of this library takes the dtype.
Gradient plain_conv(
    const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
    const std::vector<int64_t>& stride, const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation,
    int64_t groups, int64_t activation, double slope);
std::tuple<bool, Gradient, Gradient, Gradient, Gradient> plain_conv_backward(
    const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& w, int64_t needs,
    const std::vector<int64_t>& stride, const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation,
    int64_t groups, int64_t activation, double slope);

Gradient plain_conv_transpose(
    const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
    const std::vector<int64_t>& stride, const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation,
    const std::vector<int64_t>& output_padding, int64_t groups, int64_t activation, double slope);
std::tuple<bool, Gradient, Gradient, Gradient, Gradient> plain_conv_transpose_backward(
    const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& w, int64_t needs,
    const std::vector<int64_t>& stride, const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation,
    const std::vector<int64_t>& output_padding, int64_t groups, int64_t activation, double slope);

// Replaces each matrix of a [n, r, c], r <= c, by the Q with orthonormal rows of A = L Q, L lower triangular with a
// positive diagonal; and says which were well-conditioned enough for it. The others stay as they are.
Tensor orthonormal_rows_(Tensor a);

}  // namespace wnfused

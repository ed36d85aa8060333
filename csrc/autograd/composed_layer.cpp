#include "autograd/composed_layer.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "autograd/formats.h"
#include "autograd/node.h"
#include "autograd/weight.h"

namespace wnfused::composed_layer {
namespace {

using weight::kWhole;
using enum Activation;

// A wrapper of a transform has the device, the dtype and the shape of what it wraps.
bool fits(const Tensor& t, const Tensor& x) {
  return t.is_cpu() && t.scalar_type() == x.scalar_type() && t.layout() == at::kStrided;
}

void check(
    const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias, int64_t dim, int64_t activation,
    double slope) {
  TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble, "x must be float32 or float64");
  TORCH_CHECK(fits(x, x) && fits(v, x) && fits(g, x) && (!bias || fits(*bias, x)), "not all tensors are on the CPU, ",
              "in the dtype of x");
  TORCH_CHECK(x.dim() > 0 && v.dim() > 1 && dim >= kWhole && dim < v.dim(), "x, v or dim does not fit");
  const int64_t rows = dim == kWhole ? 1 : v.size(dim);
  std::vector<int64_t> broadcast(v.dim(), 1);
  if (dim != kWhole) broadcast[dim] = rows;
  const bool one_a_row = g.sizes() == at::IntArrayRef(rows) || g.sizes() == at::IntArrayRef(broadcast) ||
                         (dim == kWhole && g.dim() == 0);
  TORCH_CHECK(one_a_row, "g must have an entry a row of v");
  const bool is_slope = slope >= 0 && slope <= std::numeric_limits<double>::max();
  TORCH_CHECK(activation != kLeakyRelu || is_slope, "the slope must be finite, 0 or more");
}

Tensor finished(Tensor y, const Optional& residual, int64_t activation, double slope) {
  if (residual) TORCH_CHECK(fits(*residual, y) && residual->sizes() == y.sizes(), "residual must be like y");
  const bool rectifies = activation == kRelu || (activation == kLeakyRelu && slope == 0);
  if (is_transformed()) {  // no sample may be written to by a batch
    if (residual) y = y + *residual;
    if (activation == kNone) return y;
    return rectifies ? y.relu() : at::leaky_relu(y, slope);
  }
  if (residual) y.add_(*residual);
  if (activation == kNone) return y;
  return rectifies ? y.relu_() : at::leaky_relu_(y, slope);
}

// torch's, right as it is and differentiated: in float32 the vendor's is not for some shapes, which float64 takes.
Tensor convolution(
    const Tensor& x, const Tensor& w, const Optional& bias, const Convolution& of, at::IntArrayRef extra) {
  const auto run = [&](const Tensor& x, const Tensor& w, const Optional& bias) {
    return at::convolution(layer_graph::readable(x, of), layer_graph::readable(w, of), bias, of.stride, of.padding,
                           of.dilation, of.output_padding.has_value(), extra, of.groups);
  };
  if (x.scalar_type() == at::kDouble || layer_graph::can_compose(x, w, of)) return run(x, w, bias);
  const Optional wide_bias = bias ? Optional(bias->to(at::kDouble)) : std::nullopt;
  return run(x.to(at::kDouble), w.to(at::kDouble), wide_bias).to(x.scalar_type());
}

}  // namespace

bool takes(const Tensor& x) { return is_transformed() || (x.is_cpu() && x.scalar_type() == at::kDouble); }

Tensor linear(const LayerInputs& inputs, int64_t dim, int64_t activation, double slope) {
  const auto& [x, v, g, bias, residual] = inputs;
  check(x, v, g, bias, dim, activation, slope);
  TORCH_CHECK(v.dim() == 2 && x.size(-1) == v.size(1), "x must end in v's features in");
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == v.size(0)), "bias does not fit");
  return finished(at::linear(x, weight::of(v, g, dim), bias), residual, activation, slope);
}

Tensor conv(const LayerInputs& inputs, const Convolution& of, int64_t activation, double slope) {
  const auto& [x, v, g, bias, residual] = inputs;
  check(x, v, g, bias, 0, activation, slope);
  TORCH_CHECK(v.dim() > 2 && x.dim() == v.dim(), "x and v must be of so many dims");
  for (int64_t d = 2; d < x.dim(); ++d) TORCH_CHECK(x.size(d) > 0 || x.size(0) == 0, "x has no pixels");
  const std::vector<int64_t> extra = layer_graph::output_padding_of(of);
  for (size_t d = 0; d < extra.size() && d < of.stride.size() && d < of.dilation.size(); ++d) {
    TORCH_CHECK(extra[d] == 0 || extra[d] < std::max(of.stride[d], of.dilation[d]), "output_padding is too large");
  }
  const Tensor y = convolution(x, weight::of(v, g, 0), bias, of, extra);
  // A sample of a batch has no memory format of its own.
  return finished(is_transformed() ? y : y.contiguous(formats::of(x, v)), residual, activation, slope);
}

}  // namespace wnfused::composed_layer

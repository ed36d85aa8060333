#include "autograd/float64_layer.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace wnfused::float64_layer {
namespace {

using layer_graph::kWhole;
using enum Activation;

bool fits(const Tensor& t) { return takes(t) && t.layout() == at::kStrided; }

void check(
    const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias, int64_t dim, int64_t activation,
    double slope) {
  TORCH_CHECK(fits(x) && fits(v) && fits(g) && (!bias || fits(*bias)), "not all tensors are float64 on the CPU");
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
  if (residual) {
    TORCH_CHECK(fits(*residual) && residual->sizes() == y.sizes(), "residual must be like y");
    y.add_(*residual);
  }
  if (activation == kNone) return y;
  return activation == kRelu || slope == 0 ? y.relu_() : at::leaky_relu_(y, slope);
}

// The rule of reference.suggest_memory_format: contiguous where it is that, too, of one channel say.
at::MemoryFormat format_of(const Tensor& t) {
  const at::MemoryFormat last = t.dim() == 5 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
  const bool is_last = t.dim() > 3 && !t.is_contiguous() && t.is_contiguous(last);
  return is_last ? last : at::MemoryFormat::Contiguous;
}

at::MemoryFormat format_of(const Tensor& x, const Tensor& v) {
  const at::MemoryFormat format = format_of(x);
  return format == at::MemoryFormat::Contiguous ? format_of(v) : format;
}

}  // namespace

Tensor linear(
    const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias, const Optional& residual, int64_t dim,
    int64_t activation, double slope) {
  check(x, v, g, bias, dim, activation, slope);
  TORCH_CHECK(v.dim() == 2 && x.size(-1) == v.size(1), "x must end in v's features in");
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == v.size(0)), "bias does not fit");
  return finished(at::linear(x, layer_graph::weight(v, g, dim), bias), residual, activation, slope);
}

Tensor conv(
    const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias, const Optional& residual,
    const Convolution& of, int64_t activation, double slope) {
  check(x, v, g, bias, 0, activation, slope);
  TORCH_CHECK(v.dim() > 2 && x.dim() == v.dim(), "x and v must be of so many dims");
  for (int64_t d = 2; d < x.dim(); ++d) TORCH_CHECK(x.size(d) > 0 || x.size(0) == 0, "x has no pixels");
  const std::vector<int64_t> extra = layer_graph::output_padding_of(of);
  for (size_t d = 0; d < extra.size() && d < of.stride.size() && d < of.dilation.size(); ++d) {
    TORCH_CHECK(extra[d] == 0 || extra[d] < std::max(of.stride[d], of.dilation[d]), "output_padding is too large");
  }
  const Tensor y = at::convolution(
      layer_graph::readable(x, of), layer_graph::readable(layer_graph::weight(v, g, 0), of), bias, of.stride,
      of.padding, of.dilation, of.output_padding.has_value(), extra, of.groups);
  return finished(y.contiguous(format_of(x, v)), residual, activation, slope);
}

}  // namespace wnfused::float64_layer

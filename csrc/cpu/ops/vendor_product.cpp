// See vendor_product.h. wnfused/_convolution.py has the same rules for torch's own functions; a test holds one to the
// other.
//
// Op: cpu_vendor_misleads, whether the vendor's own result would be wrong, for the tests.
#include "cpu/ops/vendor_product.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "cpu/layer/formats.h"
#include "cpu/layer/tensor.h"

namespace wnfused::cpu {
namespace {

bool is_narrow(const Tensor& x) { return is_bfloat16(x) || x.scalar_type() == ScalarType::Float; }

// As torch tells it, by the strides of either: those of a 1x1 weight, too, which is contiguous in every order.
bool is_channels_last_for_vendor(const Tensor& x, const Tensor& w) {
  return w.dim() == 4 && (suggests_channels_last(x) || suggests_channels_last(w));
}

// In NCHW by its strides, too.
Tensor in_nchw(const Tensor& t) {
  const Tensor dense = torch::stable::contiguous(t);
  return suggests_channels_last(dense) ? with_strides(dense, contiguous_strides(sizes_of(dense))) : dense;
}

// Whether oneDNN 3 leaves results unwritten, y and the gradients, or reads and writes beyond its memory. It does
//   - over three dims with a stride along the depth where no window lies within it;
//   - where groups of one input are one column wide in the output, with a stride along it;
//   - where a whole kernel reads nothing but padding;
// and in bfloat16
//   - where some tap of it does;
//   - where any output is one column wide, over two dims or three with a stride along it;
//   - over three dims where no window lies within the depth, the padding there is more than half of a window, or the
//     last levels are behind every window: those of dx, in a backward, and of a transposed convolution's y.
// A transposed convolution is the data gradient of another one: its outputs are that one's inputs, its x has the
// windows.
bool is_unwritten(const Tensor& x, const Tensor& w, const Sliding& at, bool backward) {
  const bool half = is_bfloat16(x), transposed = at.is_transposed();
  if (!is_narrow(x)) return false;
  for (int64_t d = 2; d < w.dim(); ++d) {
    const int64_t stride = at.stride[d - 2], padding = at.padding[d - 2], dilation = at.dilation[d - 2];
    if (stride < 1 || dilation < 1) return false;  // the vendor refuses it
    const int64_t reach = dilation * (w.size(d) - 1), inside = divide_up(padding, stride);
    const int64_t windows = transposed ? x.size(d) : output_extent(x, w, at, d).value_or(0);
    const int64_t size = transposed ? transposed_extent(x, w, at, d) : x.size(d);
    if (w.dim() == 5 && d == 2) {
      const bool beyond = inside >= windows || inside * stride - padding + reach >= size;
      const bool deep = 2 * padding > reach;
      const bool unread = (backward || transposed) && (windows - 1) * stride - padding + reach < size - 1;
      if (half ? beyond || deep || unread : beyond && stride > 1) return true;
    }
    const bool any_column = half && w.dim() > 3 && w.size(d) > 1;
    if (d == w.dim() - 1 && (any_column || w.size(1) == 1) && windows == 1 && stride > 1) return true;
    int64_t missing = 0;
    for (int64_t tap = 0; tap < w.size(d); ++tap) {
      const int64_t shift = tap * dilation - padding;
      const int64_t first = shift < 0 ? divide_up(-shift, stride) : 0;  // window in which it is past the padding before
      missing += first >= windows || first * stride + shift >= size;
    }
    if (missing >= (half ? 1 : w.size(d))) return true;
  }
  return false;
}

// Whether a backward goes wrong besides, or a transposed convolution, without the weight's gradient:
//   - with a single tap, a stride and fewer than 16 inputs (of a transposed one outputs) a group it writes beyond its
//     memory, in float32 for dw and in channels_last over two dims;
//   - dw is wrong of transposed convolutions with a stride and a dilation;
// and in bfloat16
//   - with a dilation dw is wrong of groups, and in channels_last of more than 16 inputs that are no multiple of 16.
bool is_wrong_besides(const Tensor& x, const Tensor& w, const Sliding& at, bool weight) {
  if (!is_narrow(x)) return false;
  const auto exceeds_one = [](const Extents& extents) {
    return std::any_of(extents.begin(), extents.end(), [](int64_t extent) { return extent > 1; });
  };
  const bool half = is_bfloat16(x), last = is_channels_last_for_vendor(x, w);
  const bool strided = exceeds_one(at.stride), dilated = exceeds_one(at.dilation);
  const bool few = w.numel() == w.size(0) * w.size(1) && strided && w.size(1) < 16;
  if (few && (half || (weight && last))) return true;
  if (!weight || !dilated) return false;
  const bool ragged = last && w.size(1) > 16 && w.size(1) % 16 != 0;
  return (at.is_transposed() && strided) || (half && (at.groups > 1 || ragged));
}

bool vendor_is_wrong(const Tensor& x, const Tensor& w, const Sliding& at) {
  return is_unwritten(x, w, at, false) || (at.is_transposed() && is_wrong_besides(x, w, at, false));
}

bool vendor_backward_is_wrong(const Tensor& x, const Tensor& w, const Sliding& at, bool weight) {
  return is_unwritten(x, w, at, true) || is_wrong_besides(x, w, at, weight);
}

Tensor in_wider_dtype(const Tensor& t) { return as_dtype(t, is_bfloat16(t) ? ScalarType::Float : ScalarType::Double); }

// A single image cut out of others torch misreads in channels_last before groups, as it looks at the distance to the
// next one; weights of groups in channels_last oneDNN does, in transposed convolutions.
Tensor readable(const Tensor& x, const Sliding& at) {
  const bool cut_out = x.size(0) == 1 && x.stride(0) != x.numel();
  return at.groups > 1 && cut_out ? torch::stable::contiguous(x) : x;
}

Tensor readable_weight(const Tensor& w, const Sliding& at) {
  return at.groups > 1 && at.is_transposed() ? torch::stable::contiguous(w) : w;
}

}  // namespace

Tensor vendor_product(const Tensor& x_given, const Tensor& w_given, const std::optional<Tensor>& bias,
                      const Sliding& at) {
  const bool transposed = at.is_transposed();
  const Tensor x = transposed ? readable(x_given, at) : x_given, w = readable_weight(w_given, at);
  if (vendor_is_wrong(x, w, at)) {
    const std::optional<Tensor> wide = bias ? std::optional(in_wider_dtype(*bias)) : std::nullopt;
    return as_dtype(vendor_product(in_wider_dtype(x), in_wider_dtype(w), wide, at), x.scalar_type());
  }
  AtenTensorHandle given = bias ? bias->get() : nullptr, made = nullptr;
  const Extents extra = at.output_paddings();
  const int64_t dims = static_cast<int64_t>(at.stride.size());
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_convolution(
      x.get(), w.get(), bias ? &given : nullptr, at.stride.data(), dims, at.padding.data(), dims, at.dilation.data(),
      dims, transposed, extra.data(), dims, at.groups, &made));
  return Tensor(made);
}

std::pair<Tensor, Tensor> vendor_product_backward(const Tensor& dz, const Tensor& x_given, const Tensor& w_given,
                                                  const Sliding& at, bool input, bool weight) {
  const Tensor x = readable(x_given, at), w = readable_weight(w_given, at);
  if (vendor_backward_is_wrong(x, w, at, weight)) {
    if (x.scalar_type() == ScalarType::Float && is_channels_last_for_vendor(x, w)) {
      // Some are right in NCHW, and faster so than in float64.
      const Tensor planes = in_nchw(x), weights = in_nchw(w);
      if (!vendor_backward_is_wrong(planes, weights, at, weight)) {
        auto [dx, dw] = vendor_product_backward(in_nchw(dz), planes, weights, at, input, weight);
        return {input ? in_channels_last(dx) : dx, weight ? laid_out_as(dw, w) : dw};
      }
    }
    std::pair<Tensor, Tensor> found =
        vendor_product_backward(in_wider_dtype(dz), in_wider_dtype(x), in_wider_dtype(w), at, input, weight);
    if (input) found.first = as_dtype(found.first, x.scalar_type());
    if (weight) found.second = as_dtype(found.second, x.scalar_type());
    return found;
  }
  AtenTensorHandle dx = nullptr, dw = nullptr, db = nullptr;
  const Extents extra = at.output_paddings();
  const int64_t dims = static_cast<int64_t>(at.stride.size());
  const int32_t mask[] = {input, weight, 0};
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_convolution_backward(
      dz.get(), x.get(), w.get(), nullptr, 0, at.stride.data(), dims, at.padding.data(), dims, at.dilation.data(), dims,
      at.is_transposed(), extra.data(), dims, at.groups, mask, 3, &dx, &dw, &db));
  const Tensor unused(db);
  return {Tensor(dx), Tensor(dw)};
}

namespace {

// Forward, and backward with every gradient.
std::tuple<bool, bool> cpu_vendor_misleads(const Tensor& x, const Tensor& w, const Extents& stride,
                                           const Extents& padding, const Extents& dilation, bool transposed,
                                           const Extents& output_padding, int64_t groups) {
  const Sliding at{stride, padding, dilation, groups, transposed ? &output_padding : nullptr};
  check_window(x, w, at);
  return {vendor_is_wrong(x, w, at), vendor_backward_is_wrong(x, w, at, true)};
}

}  // namespace
}  // namespace wnfused::cpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CPU, m) {
  m.impl("cpu_vendor_misleads", TORCH_BOX(&wnfused::cpu::cpu_vendor_misleads));
}

#include "cpu/ops/conv_call.h"

#include "cpu/ops/unfolding.h"

namespace wnfused::cpu {

ConvShape conv_shape(const Tensor& x, const Tensor& v, const Sliding& at) {
  const int64_t inputs = x.size(1) == v.size(1) * at.groups ? x.size(1) : 0;
  return {x.size(0),
          inputs,
          v.size(0),
          triple_of(x.sizes(), 2, 1),
          triple_of(v.sizes(), 2, 1),
          triple_of(at.stride, 0, 1),
          triple_of(at.padding, 0, 0),
          triple_of(at.dilation, 0, 1),
          at.groups};
}

ConvTraits traits_of(const ConvCall& conv) {
  const bool transposed = conv.at.is_transposed();
  return {conv.shape, transposed, conv.v.dim() - 2, gives_channels_last(conv), !transposed && is_rows(conv.x),
          is_bfloat16(conv.x), conv.gain == nullptr};
}

void check_window(const Tensor& x, const Tensor& v, const Sliding& at) {
  const size_t spatial = static_cast<size_t>(v.dim()) - 2;
  STD_TORCH_CHECK(v.dim() >= 3 && v.dim() <= 5 && x.dim() == v.dim(), "conv: x and v must have 3, 4 or 5 dims");
  STD_TORCH_CHECK(at.stride.size() == spatial && at.padding.size() == spatial && at.dilation.size() == spatial,
                  "conv: stride, padding and dilation must have ", spatial, " entries");
  STD_TORCH_CHECK(are_near(at.stride) && are_near(at.padding) && are_near(at.dilation),
                  "conv: stride, padding and dilation must be below 2^31");
  STD_TORCH_CHECK(at.groups >= 1, "conv: groups must be at least 1");
  STD_TORCH_CHECK(v.numel() > 0, "conv: v must have channels and taps, at least 1 each");
}

std::optional<int64_t> output_extent(const Tensor& x, const Tensor& v, const Sliding& at, int64_t d) {
  const int64_t stride = at.stride[d - 2], padding = at.padding[d - 2], dilation = at.dilation[d - 2];
  const bool known = stride >= 1 && padding >= 0 && dilation >= 1 && v.size(d) >= 1;
  const int64_t room = known ? x.size(d) + 2 * padding - dilation * (v.size(d) - 1) - 1 : -1;
  return room >= 0 ? std::optional(room / stride + 1) : std::nullopt;
}

int64_t transposed_extent(const Tensor& x, const Tensor& v, const Sliding& at, int64_t d) {
  const int64_t reach = at.dilation[d - 2] * (v.size(d) - 1);
  return (x.size(d) - 1) * at.stride[d - 2] - 2 * at.padding[d - 2] + reach + (*at.output_padding)[d - 2] + 1;
}

void check_output(const Tensor& t, const char* name, const Tensor& x, const Tensor& v, const Sliding& at) {
  bool fits = t.scalar_type() == x.scalar_type() && t.dim() == x.dim() && t.size(0) == x.size(0) &&
              t.size(1) == v.size(0);
  for (int64_t d = 2; fits && d < v.dim(); ++d) fits = output_extent(x, v, at, d) == t.size(d);
  STD_TORCH_CHECK(fits, "conv: ", name, " must have the dtype of x and the shape of the output");
}

}  // namespace wnfused::cpu

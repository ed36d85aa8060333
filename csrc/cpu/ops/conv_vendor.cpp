// A convolution layer on the vendor's convolution, in the memory format that torch picks for it:
//
//      map-heavy layers        w = s v beforehand if no pass over z can take the scale along; else, and
//      weight-heavy layers     z = conv(x, v), the scale in the epilogue; dx from s dz, dw from dz
//
// z [N, C, spatial] is a matrix of lines along C (channels_last) or along the map (NCHW), and each pass of ours works
// line by line. Floor beside the products: v once, z read and written once; backward dy, y, dz (and s dz) and dw, v, dv
// once each.
//
// Op: cpu_vendor_misleads, whether the vendor's own result would be wrong, for the tests.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "cpu/layer/checks.h"
#include "cpu/layer/formats.h"
#include "cpu/layer/gains.h"
#include "cpu/layer/passes.h"
#include "cpu/ops/conv_routes.h"

namespace wnfused::cpu {
namespace {

// Whether oneDNN 3 leaves results unwritten, y and the gradients, or reads and writes beyond its memory. It does
//   - over three dims with a stride along the depth where no window lies within it;
//   - where groups of one input are one column wide in the output, with a stride along it;
//   - where a whole kernel reads nothing but padding;
// and in bfloat16
//   - where some tap of it does;
//   - where any output is one column wide, over two dims or three with a stride along it;
//   - over three dims where no window lies within the depth, or the padding there is more than half of a window.
// wnfused/_convolution.py has the same rules for torch's own functions; a test holds one to the other.
bool vendor_is_wrong(const Tensor& x, const Tensor& w, const Sliding& at) {
  const bool half = is_bfloat16(x), single = x.scalar_type() == ScalarType::Float;
  for (int64_t d = 2; (half || single) && d < w.dim(); ++d) {
    const int64_t stride = at.stride[d - 2], padding = at.padding[d - 2];
    if (stride < 1) return false;  // the vendor refuses it
    const int64_t windows = output_extent(x, w, at, d).value_or(0);
    const int64_t reach = at.dilation[d - 2] * (w.size(d) - 1), inside = divide_up(padding, stride);
    if (w.dim() == 5 && d == 2) {
      const bool beyond = inside >= windows || inside * stride - padding + reach >= x.size(d);
      const bool deep = 2 * padding > reach;
      if (half ? beyond || deep : beyond && stride > 1) return true;
    }
    const bool any_column = half && w.dim() > 3 && w.size(d) > 1;
    if (d == w.dim() - 1 && (any_column || w.size(1) == 1) && windows == 1 && stride > 1) return true;
    int64_t missing = 0;
    for (int64_t tap = 0; tap < w.size(d); ++tap) {
      const int64_t shift = tap * at.dilation[d - 2] - padding;
      const int64_t first = shift < 0 ? divide_up(-shift, stride) : 0;  // window in which it is past the padding before
      missing += first >= windows || first * stride + shift >= x.size(d);
    }
    if (missing >= (half ? 1 : w.size(d))) return true;
  }
  return false;
}

// Whether the last levels of a volume lie behind every window.
bool has_levels_unread(const Tensor& x, const Tensor& w, const Sliding& at) {
  if (w.dim() != 5) return false;
  const int64_t last = (output_extent(x, w, at, 2).value_or(1) - 1) * at.stride[0] - at.padding[0];
  return last + at.dilation[0] * (w.size(2) - 1) < x.size(2) - 1;
}

bool is_channels_last_for_vendor(const Tensor& x, const Tensor& w) {
  return w.dim() == 4 && !(x.is_contiguous() && w.is_contiguous());
}

// The same for the backward, where more goes wrong:
//   - with a single tap, a stride and fewer than 16 inputs it writes beyond its memory, in float32 for dw and in
//     channels_last over two dims;
// and in bfloat16
//   - gradients of levels that no window reads are not written;
//   - with a dilation dw is wrong of groups, and in channels_last of more than 16 inputs that are no multiple of 16.
bool vendor_backward_is_wrong(const Tensor& x, const Tensor& w, const Sliding& at, bool weight) {
  if (vendor_is_wrong(x, w, at)) return true;
  const bool strided = *std::max_element(at.stride.begin(), at.stride.end()) > 1;
  const bool few = w.numel() == w.size(0) * w.size(1) && strided && w.size(1) < 16;
  const bool last = is_channels_last_for_vendor(x, w);
  if (x.scalar_type() == ScalarType::Float) return few && weight && last;
  if (!is_bfloat16(x)) return false;
  if (few || has_levels_unread(x, w, at)) return true;
  const bool dilated = *std::max_element(at.dilation.begin(), at.dilation.end()) > 1;
  const bool ragged = last && w.size(1) > 16 && w.size(1) % 16 != 0;
  return weight && dilated && (at.groups > 1 || ragged);
}

Tensor in_wider_dtype(const Tensor& t) { return as_dtype(t, is_bfloat16(t) ? ScalarType::Float : ScalarType::Double); }

Tensor convolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const Sliding& at) {
  if (vendor_is_wrong(x, w, at)) {
    const std::optional<Tensor> wide = bias ? std::optional(in_wider_dtype(*bias)) : std::nullopt;
    return as_dtype(convolution(in_wider_dtype(x), in_wider_dtype(w), wide, at), x.scalar_type());
  }
  AtenTensorHandle given = bias ? bias->get() : nullptr, made = nullptr;
  const Extents none(at.stride.size(), 0);
  const int64_t dims = static_cast<int64_t>(at.stride.size());
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_convolution(
      x.get(), w.get(), bias ? &given : nullptr, at.stride.data(), dims, at.padding.data(), dims, at.dilation.data(),
      dims, 0, none.data(), dims, at.groups, &made));
  return Tensor(made);
}

// A single image cut out of others torch misreads in channels_last before groups, as it looks at the distance to the
// next one.
Tensor readable(const Tensor& x, const Sliding& at) {
  const bool cut_out = x.size(0) == 1 && x.stride(0) != x.numel();
  return at.groups > 1 && cut_out ? torch::stable::contiguous(x) : x;
}

// (dx, dw), each undefined unless asked for.
std::pair<Tensor, Tensor> convolution_backward(
    const Tensor& dz, const Tensor& x_given, const Tensor& w, const Sliding& at, bool input, bool weight) {
  const Tensor x = readable(x_given, at);
  const auto contiguous = [](const Tensor& t) { return torch::stable::contiguous(t); };
  if (vendor_backward_is_wrong(x, w, at, weight)) {
    // In NCHW it is right, and faster than in float64.
    if (x.scalar_type() == ScalarType::Float && is_channels_last_for_vendor(x, w) && !vendor_is_wrong(x, w, at)) {
      auto [dx, dw] = convolution_backward(contiguous(dz), contiguous(x), contiguous(w), at, input, weight);
      return {input ? laid_out_as(dx, x) : dx, weight ? laid_out_as(dw, w) : dw};
    }
    std::pair<Tensor, Tensor> found =
        convolution_backward(in_wider_dtype(dz), in_wider_dtype(x), in_wider_dtype(w), at, input, weight);
    if (input) found.first = as_dtype(found.first, x.scalar_type());
    if (weight) found.second = as_dtype(found.second, x.scalar_type());
    return found;
  }
  AtenTensorHandle dx = nullptr, dw = nullptr, db = nullptr;
  const Extents none(at.stride.size(), 0);
  const int64_t dims = static_cast<int64_t>(at.stride.size());
  const int32_t mask[] = {input, weight, 0};
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_convolution_backward(
      dz.get(), x.get(), w.get(), nullptr, 0, at.stride.data(), dims, at.padding.data(), dims, at.dilation.data(), dims,
      0, none.data(), dims, at.groups, mask, 3, &dx, &dw, &db));
  const Tensor unused(db);
  return {Tensor(dx), Tensor(dw)};
}

// The map, of so many entries, is larger than the weight: then the pass that scales the weight is the cheaper one.
bool map_heavy(int64_t entries, const Tensor& v) { return entries > v.numel(); }

int64_t output_entries(const ConvCall& conv) {
  int64_t entries = conv.x.size(0) * conv.v.size(0);
  // If there is no output at all, the vendor raises its own error.
  for (int64_t d = 2; d < conv.v.dim(); ++d) entries *= output_extent(conv.x, conv.v, conv.at, d).value_or(0);
  return entries;
}

// Applies the scale and the bias, null where the product has them already, in the pass over z that is needed anyway.
// Returns whether all of z is finite.
bool finish(const ConvCall& conv, const Tensor& y, const std::optional<Tensor>& residual_given, const float* scale,
            const float* added) {
  const Tensor z = in_lines(y);
  std::optional<Tensor> residual;
  if (residual_given) residual = laid_out_as(*residual_given, z);
  const bool finite = run_epilogue(
      lines_of(z), {values_of(z), residual ? values_of(*residual) : Values{nullptr, is_bfloat16(conv.x)}, scale, added,
                    conv.activation, conv.slope});
  if (z.get() != y.get() && z.const_data_ptr() != y.const_data_ptr()) {
    Tensor target = y;
    torch::stable::copy_(target, z);
  }
  return finite;
}

}  // namespace

Tensor vendor_conv(const ConvCall& conv, const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                   float* norms) {
  const Tensor &x = conv.x, &v = conv.v;
  const int64_t channels = v.size(0);
  const bool passes = conv.activation != Activation::kNone || residual;
  if (!is_bfloat16(x) && (passes || !map_heavy(output_entries(conv), v))) {
    row_norms(v, norms, 0, channels);
    const std::vector<float> scale = scales_of(conv.gain, norms, channels);
    if (all_can_wait(scale)) {
      std::vector<float> added(channels, 0.0f);
      if (conv.bias) std::copy_n(conv.bias, channels, added.begin());
      const Tensor y = convolution(x, v, std::nullopt, conv.at);
      check_residual(residual, y);
      if (finish(conv, y, residual, scale.data(), added.data())) return y;
    }
  }
  const Tensor w = scaled_weight(v, conv.gain, norms, x.scalar_type());
  std::optional<Tensor> shift = bias;
  if (bias && bias->scalar_type() != x.scalar_type()) {
    Rounded narrow(sizes_of(*bias), x.scalar_type());
    std::copy_n(conv.bias, channels, narrow.data());
    shift = narrow.tensor();
  }
  const Tensor y = convolution(x, w, shift, conv.at);
  check_residual(residual, y);
  if (passes) finish(conv, y, residual, nullptr, nullptr);
  return y;
}

LayerGradients vendor_conv_backward(const ConvCall& conv, const Tensor& dy_given, const Tensor& y, const float* norms,
                                    const Needs& needs, float* dgain) {
  const Tensor &x = conv.x, &v = conv.v;
  const int64_t channels = v.size(0);
  const bool half = is_bfloat16(x), masked = conv.activation != Activation::kNone;
  // Without an activation y is not kept, and dy's own format is as good as any.
  const Tensor signs = in_lines(masked ? y : dy_given);
  const Tensor dy = laid_out_as(dy_given, signs);
  // s dz for the products, unless dy can be taken as it is and the scaled weight is the smaller of the two.
  const bool scale_dz = (needs.x || needs.v) && !half && (masked || !map_heavy(dy.numel(), v));
  const std::vector<float> scale = scale_dz ? scales_of(conv.gain, norms, channels) : std::vector<float>();
  const bool shared = scale_dz && are_invertible(scale, norms);
  LayerGradients made;
  std::optional<Tensor> dw, scaled, dz = dy;
  if (scale_dz) scaled = empty_as(dy);
  if (masked && shared && !needs.residual) dz.reset();
  else if (masked) dz = empty_as(dy);
  std::optional<Rounded> bias_gradient;
  if (needs.bias) bias_gradient.emplace(std::vector<int64_t>{channels}, v.scalar_type());
  if (masked || scale_dz || needs.bias) {
    run_mask(lines_of(dy),
             {values_of(dy), values_of(signs), masked && dz ? values_of(*dz) : Values{nullptr, half},
              scale_dz ? values_of(*scaled) : Values{nullptr, half}, scale.data(), nullptr, conv.activation,
              conv.slope},
             needs.bias ? bias_gradient->data() : nullptr);
  }
  if (needs.bias) made.dbias = bias_gradient->tensor();

  if (scale_dz && !shared) {
    if (needs.x) made.dx = convolution_backward(*scaled, x, v, conv.at, true, false).first;
    if (needs.v) dw = convolution_backward(*dz, x, v, conv.at, false, true).second;
  } else if (needs.x || needs.v) {
    std::vector<float> again(channels);
    // The weight's gradient reads no more of the weight than its shape.
    const Tensor w = scale_dz || (!needs.x && !half) ? v : scaled_weight(v, conv.gain, again.data(), x.scalar_type());
    std::pair<Tensor, Tensor> found = convolution_backward(shared ? *scaled : *dz, x, w, conv.at, needs.x, needs.v);
    if (needs.x) made.dx = found.first;
    if (needs.v) dw = found.second;
  }
  if (needs.v) {
    // dw in channels_last beside a contiguous v: its rows are put in v's order on the way, any other pair beforehand.
    const bool reorder = v.is_contiguous() && is_channels_last(*dw);
    if (!reorder) dw = laid_out_as(*dw, v);
    // A row is the same run of memory in either order, so dw's memory can become dv's.
    made.dv = dw->scalar_type() != v.scalar_type() ? empty_as(v) : reorder ? viewed_as(*dw, v) : *dw;
    const int64_t inner = row_length(v);
    const RowGradient task{values_of(*dw), values_of(v), values_of(*made.dv), conv.gain, norms, dgain, shared,
                           reorder ? inner / v.size(1) : 1, nullptr};
    for_rows(0, channels, inner, [&](int64_t begin, int64_t end) {
      std::vector<float> scratch(reorder ? inner : 0);
      RowGradient part = task;
      part.scratch = scratch.data();
      layer_kernels().gradient({begin, end, inner}, part);
    });
  }
  if (needs.residual && masked) made.dz = dz;
  return made;
}

namespace {

// Forward, and backward with every gradient.
std::tuple<bool, bool> cpu_vendor_misleads(const Tensor& x, const Tensor& w, const Extents& stride,
                                           const Extents& padding, const Extents& dilation, int64_t groups) {
  const Sliding at{stride, padding, dilation, groups};
  check_window(x, w, at);
  return {vendor_is_wrong(x, w, at), vendor_backward_is_wrong(x, w, at, true)};
}

}  // namespace
}  // namespace wnfused::cpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CPU, m) {
  m.impl("cpu_vendor_misleads", TORCH_BOX(&wnfused::cpu::cpu_vendor_misleads));
}

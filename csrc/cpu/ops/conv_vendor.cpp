// A convolution layer, or a transposed one, on the vendor's convolution, in the memory format that torch picks for it:
//
//      map-heavy layers        w = s v beforehand if no pass over z can take the scale along; else, and
//      weight-heavy layers     z = conv(x, v), the scale in the epilogue; dx and, where it can, dw from s dz
//
// (A transposed layer's rows belong to x's channels: its w is always scaled beforehand.)
//
// z [N, C, spatial] is a matrix of lines along C (channels_last) or along the map (NCHW), and each pass of ours works
// line by line. Floor beside the products: v once, z read and written once; backward dy, y, dz (and s dz) and dw, v, dv
// once each.
#include <algorithm>

#include "cpu/layer/checks.h"
#include "cpu/layer/formats.h"
#include "cpu/layer/gains.h"
#include "cpu/layer/passes.h"
#include "cpu/ops/conv_routes.h"
#include "cpu/ops/vendor_product.h"

namespace wnfused::cpu {
namespace {

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
  const bool passes = conv.activation != Activation::kNone || residual, takes_scale = !conv.at.is_transposed();
  if (takes_scale && !is_bfloat16(x) && (passes || !map_heavy(output_entries(conv), v))) {
    row_norms(v, norms, 0, channels);
    const std::vector<float> scale = scales_of(conv.gain, norms, channels);
    if (all_can_wait(scale)) {
      std::vector<float> added(channels, 0.0f);
      if (conv.bias) std::copy_n(conv.bias, channels, added.begin());
      const Tensor y = vendor_product(x, v, std::nullopt, conv.at);
      check_residual(residual, y);
      if (finish(conv, y, residual, scale.data(), added.data())) return y;
    }
  }
  const Tensor w = scaled_weight(v, conv.gain, norms, x.scalar_type());
  std::optional<Tensor> shift = bias;
  if (bias && bias->scalar_type() != x.scalar_type()) {
    Rounded narrow(sizes_of(*bias), x.scalar_type());
    std::copy_n(conv.bias, bias->numel(), narrow.data());
    shift = narrow.tensor();
  }
  const Tensor y = vendor_product(x, w, shift, conv.at);
  check_residual(residual, y);
  if (passes) finish(conv, y, residual, nullptr, nullptr);
  return y;
}

LayerGradients vendor_conv_backward(const ConvCall& conv, const Tensor& dy_given, const Tensor& y, const float* norms,
                                    const Needs& needs, float* dgain) {
  const Tensor &x = conv.x, &v = conv.v;
  const int64_t channels = v.size(0);
  const bool half = is_bfloat16(x), takes_scale = !half && !conv.at.is_transposed();
  const bool masked = conv.activation != Activation::kNone;
  // Without an activation y is not kept, and dy's own format is as good as any.
  const Tensor signs = in_lines(masked ? y : dy_given);
  const Tensor dy = laid_out_as(dy_given, signs);
  // s dz for the products, unless dy can be taken as it is and the scaled weight is the smaller of the two.
  const bool scale_dz = (needs.x || needs.v) && takes_scale && (masked || !map_heavy(dy.numel(), v));
  const std::vector<float> scale = scale_dz ? scales_of(conv.gain, norms, channels) : std::vector<float>();
  const bool shared = scale_dz && are_invertible(scale, norms);
  LayerGradients made;
  std::optional<Tensor> dw, scaled, dz = dy;
  if (scale_dz) scaled = empty_as(dy);
  if (masked && shared && !needs.residual) dz.reset();
  else if (masked) dz = empty_as(dy);
  std::optional<Rounded> bias_gradient;
  if (needs.bias) bias_gradient.emplace(std::vector<int64_t>{dy.size(1)}, v.scalar_type());
  if (masked || scale_dz || needs.bias) {
    run_mask(lines_of(dy),
             {values_of(dy), values_of(signs), masked && dz ? values_of(*dz) : Values{nullptr, half},
              scale_dz ? values_of(*scaled) : Values{nullptr, half}, scale.data(), nullptr, conv.activation,
              conv.slope},
             needs.bias ? bias_gradient->data() : nullptr);
  }
  if (needs.bias) made.dbias = bias_gradient->tensor();

  if (scale_dz && !shared) {
    if (needs.x) made.dx = vendor_product_backward(*scaled, x, v, conv.at, true, false).first;
    if (needs.v) dw = vendor_product_backward(*dz, x, v, conv.at, false, true).second;
  } else if (needs.x || needs.v) {
    std::vector<float> again(channels);
    // The weight's gradient reads no more of the weight than its shape.
    const Tensor w = scale_dz || (!needs.x && !half) ? v : scaled_weight(v, conv.gain, again.data(), x.scalar_type());
    std::pair<Tensor, Tensor> found = vendor_product_backward(shared ? *scaled : *dz, x, w, conv.at, needs.x, needs.v);
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

}  // namespace wnfused::cpu

// conv: y = act(s conv(x, v) + b + residual) over 1 to 3 spatial dims, and its gradients.
//
//      float32, one or two dims                 kernels of this library (conv_layer.h), where they are faster
//      map-heavy layers (most of the others)    w = s v beforehand where there is no pass over z to ride in; else, and
//      weight-heavy layers                      z = conv(x, v), the scale in the epilogue; dx from s dz, dw from dz
//
// The vendor's library takes the convolutions of the last two rows, in the memory format that torch picks for them;
// z [N, C, spatial] is then a matrix of lines along C (channels_last) or along the map (NCHW), and each pass of ours
// works line by line. Floor beside the products: v once, z read and written once; backward dy, y, dz (and s dz) and dw,
// v, dv once each.
#include <torch/csrc/stable/library.h>

#include "../ops.h"
#include "conv_own.h"

namespace wnfused {
namespace {

using namespace cpu;
Tensor convolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const Sliding& at) {
  AtenTensorHandle given = bias ? bias->get() : nullptr, made = nullptr;
  const Extents none(at.stride.size(), 0);
  const int64_t dims = static_cast<int64_t>(at.stride.size());
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_convolution(
      x.get(), w.get(), bias ? &given : nullptr, at.stride.data(), dims, at.padding.data(), dims, at.dilation.data(),
      dims, 0, none.data(), dims, at.groups, &made));
  return Tensor(made);
}

// (dx, dw), each undefined unless asked for.
std::pair<Tensor, Tensor> convolution_backward(
    const Tensor& dz, const Tensor& x, const Tensor& w, const Sliding& at, bool input, bool weight) {
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

Lines lines_of(const Tensor& z) {
  const int64_t channels = z.size(1), entries = z.numel();
  if (entries == 0) return {true, 0, 0, channels, channels};
  if (is_channels_last(z)) return {true, 0, entries / channels, channels, channels};
  const int64_t planes = z.size(0) * channels;
  return {false, 0, planes, entries / planes, channels};
}

// Neither NCHW nor channels_last (a channels_last_3d map, say): the passes work on an NCHW copy.
Tensor in_lines(const Tensor& z) {
  return z.is_contiguous() || is_channels_last(z) ? z : torch::stable::contiguous(z);
}

// The map is larger than the weight: then the pass that scales the weight is the cheaper one.
bool map_heavy(const Tensor& z, const Tensor& v) { return z.numel() > v.numel(); }

}  // namespace

std::tuple<Tensor, Tensor> conv(
    const Tensor& x, const Tensor& v_given, const Tensor& g, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual_given, const Extents& stride, const Extents& padding,
    const Extents& dilation, int64_t groups, int64_t activation, double slope) {
  check_parameters(x, v_given, g, bias);
  check_activation(activation, slope);
  const Tensor v = has_dense_rows(v_given) ? v_given : torch::stable::contiguous(v_given);
  const Sliding window{stride, padding, dilation, groups};
  check_window(x, v, window);
  const Activation act = static_cast<Activation>(activation);
  const int64_t channels = v.size(0);
  const bool half = is_bfloat16(x);
  Tensor norm = empty({channels}, ScalarType::Float);
  float* norms = static_cast<float*>(norm.mutable_data_ptr());
  std::vector<float> held_gain, held_bias;
  const float* gain = floats_of(g, held_gain);

  // The scale, and beside it the bias, in a pass over z that is needed anyway; else, or where it cannot wait, in w.
  const auto finished = [&](Tensor y, const std::vector<float>& scale, const std::vector<float>& added) {
    const Tensor z = in_lines(y);
    std::optional<Tensor> residual;
    if (residual_given) residual = laid_out_as(*residual_given, z);
    const bool finite = run_epilogue(
        lines_of(z), {values_of(z), residual ? values_of(*residual) : Values{nullptr, half}, scale.data(), added.data(),
                      act, static_cast<float>(slope)});
    if (z.get() != y.get() && z.const_data_ptr() != y.const_data_ptr()) torch::stable::copy_(y, z);
    return finite;
  };
  const float* biases = bias ? floats_of(*bias, held_bias) : nullptr;
  const OwnConv own{x, v, gain, biases, window, act, static_cast<float>(slope)};
  if (const std::optional<Tensor> y = own_conv(own, residual_given, norms)) return {*y, norm};
  const bool passes = act != Activation::kNone || residual_given;
  if (!half && passes) {
    row_norms(v, norms, 0, channels);
    const std::vector<float> scale = scales_of(gain, norms, channels);
    if (all_can_wait(scale)) {
      std::vector<float> added(channels, 0.0f);
      if (bias) std::copy_n(biases, channels, added.begin());
      const Tensor y = convolution(x, v, std::nullopt, window);
      check_residual(residual_given, y);
      if (finished(y, scale, added)) return {y, norm};
    }
  }
  const Tensor w = scaled_weight(v, gain, norms, x.scalar_type());
  std::optional<Tensor> shift = bias;
  if (bias && bias->scalar_type() != x.scalar_type()) shift = torch::stable::to(*bias, x.scalar_type());
  const Tensor y = convolution(x, w, shift, window);
  check_residual(residual_given, y);
  if (passes) finished(y, std::vector<float>(channels, 1.0f), std::vector<float>(channels, 0.0f));
  return {y, norm};
}

std::tuple<Gradient, Gradient, Gradient, Gradient, Gradient> conv_backward(
    const Tensor& dy_given, const Tensor& y, const Tensor& x, const Tensor& v_given, const Tensor& g,
    const Tensor& norm, int64_t needs, const Extents& stride, const Extents& padding, const Extents& dilation,
    int64_t groups, int64_t activation, double slope) {
  check_parameters(x, v_given, g, std::nullopt);
  const bool need_x = needs & 1, need_v = needs & 2, need_bias = needs & 4, need_residual = needs & 8;
  const Tensor v = has_dense_rows(v_given) ? v_given : torch::stable::contiguous(v_given);
  const Sliding window{stride, padding, dilation, groups};
  check_window(x, v, window);
  check_activation(activation, slope);
  const int64_t channels = v.size(0);
  const bool half = is_bfloat16(x), masked = activation != 0;
  check_output(dy_given, "dy", x, v, window);
  if (masked) check_output(y, "y", x, v, window);
  check_norm(norm, channels);
  std::vector<float> held;
  const float* gain = floats_of(g, held);
  const float* norms = entries<float>(norm);

  Rounded own_dgain(sizes_of(g), g.scalar_type());
  const OwnConv own{x, v, gain, nullptr, window, static_cast<Activation>(activation), static_cast<float>(slope)};
  if (const auto found = own_conv_backward(own, dy_given, y, norms, needs, own_dgain.data()))
    return {found->dx, found->dv, need_v ? Gradient(own_dgain.tensor()) : Gradient(), found->dbias, found->dz};
  // Without an activation y is not kept, and dy's own format is as good as any.
  const Tensor signs = in_lines(masked ? y : dy_given);
  const Tensor dy = laid_out_as(dy_given, signs);
  // s dz for the products, unless dy can be taken as it is and the scaled weight is the smaller of the two.
  const bool scale_dz = (need_x || need_v) && !half && (masked || !map_heavy(dy, v));
  const std::vector<float> scale = scale_dz ? scales_of(gain, norms, channels) : std::vector<float>();
  const bool shared = scale_dz && are_invertible(scale, norms);
  Gradient dx, dv, dg, db, dw, scaled, dz = dy;
  if (scale_dz) scaled = empty_as(dy);
  if (masked && shared && !need_residual) dz.reset();
  else if (masked) dz = empty_as(dy);
  std::optional<Rounded> bias_gradient;
  if (need_bias) bias_gradient.emplace(std::vector<int64_t>{channels}, v.scalar_type());
  if (masked || scale_dz || need_bias) {
    run_mask(lines_of(dy),
             {values_of(dy), values_of(signs), masked && dz ? values_of(*dz) : Values{nullptr, half},
              scale_dz ? values_of(*scaled) : Values{nullptr, half}, scale.data(), nullptr,
              static_cast<Activation>(activation), static_cast<float>(slope)},
             need_bias ? bias_gradient->data() : nullptr);
  }
  if (need_bias) db = bias_gradient->tensor();

  if (scale_dz && !shared) {
    if (need_x) dx = convolution_backward(*scaled, x, v, window, true, false).first;
    if (need_v) dw = convolution_backward(*dz, x, v, window, false, true).second;
  } else if (need_x || need_v) {
    std::vector<float> again(channels);
    // The weight's gradient reads no more of the weight than its shape.
    const Tensor w = scale_dz || (!need_x && !half) ? v : scaled_weight(v, gain, again.data(), x.scalar_type());
    std::pair<Tensor, Tensor> found = convolution_backward(shared ? *scaled : *dz, x, w, window, need_x, need_v);
    if (need_x) dx = found.first;
    if (need_v) dw = found.second;
  }
  if (need_v) {
    // dw in channels_last beside a contiguous v: its rows are put in v's order on the way, any other pair beforehand.
    const bool reorder = v.is_contiguous() && is_channels_last(*dw);
    if (!reorder) dw = laid_out_as(*dw, v);
    // A row is the same run of memory in either order, so dw's memory can become dv's.
    dv = dw->scalar_type() != v.scalar_type() ? empty_as(v) : reorder ? viewed_as(*dw, v) : *dw;
    Rounded gain_gradient(sizes_of(g), g.scalar_type());
    const int64_t inner = row_length(v);
    const RowGradient task{values_of(*dw), values_of(v), values_of(*dv), gain, norms, gain_gradient.data(), shared,
                           reorder ? v.size(2) * v.size(3) : 1, nullptr};
    for_rows(0, channels, inner, [&](int64_t begin, int64_t end) {
      std::vector<float> scratch(reorder ? inner : 0);
      RowGradient part = task;
      part.scratch = scratch.data();
      layer_kernels().gradient({begin, end, inner}, part);
    });
    dg = gain_gradient.tensor();
  }
  if (!need_residual || !masked) dz.reset();
  return {dx, dv, dg, db, dz};
}

}  // namespace wnfused

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CPU, library) {
  library.impl("conv", TORCH_BOX(&wnfused::conv));
  library.impl("conv_backward", TORCH_BOX(&wnfused::conv_backward));
}

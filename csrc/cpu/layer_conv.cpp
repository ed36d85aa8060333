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
#include "conv_layer.h"
#include "layer_tensor.h"

namespace wnfused {
namespace {

using namespace cpu;
using Extents = std::vector<int64_t>;

struct Sliding {
  const Extents &stride, &padding, &dilation;
  int64_t groups;
};

void check_window(const Tensor& x, const Tensor& v, const Sliding& at) {
  const size_t spatial = static_cast<size_t>(v.dim()) - 2;
  STD_TORCH_CHECK(v.dim() >= 3 && v.dim() <= 5 && x.dim() == v.dim(), "conv: x and v must have 3, 4 or 5 dims");
  STD_TORCH_CHECK(at.stride.size() == spatial && at.padding.size() == spatial && at.dilation.size() == spatial,
                  "conv: stride, padding and dilation must have ", spatial, " entries");
  STD_TORCH_CHECK(at.groups >= 1, "conv: groups must be at least 1");
}

// A gradient, or an output, of a layer over any number of dims.
void check_output(const Tensor& t, const char* name, const Tensor& x, const Tensor& v, const Sliding& at) {
  constexpr int64_t kFar = int64_t{1} << 31;
  bool fits = t.scalar_type() == x.scalar_type() && t.dim() == x.dim() && t.size(0) == x.size(0) &&
              t.size(1) == v.size(0);
  for (int64_t d = 2; fits && d < v.dim(); ++d) {
    const int64_t stride = at.stride[d - 2], padding = at.padding[d - 2], dilation = at.dilation[d - 2];
    fits = stride >= 1 && 0 <= padding && padding < kFar && 1 <= dilation && dilation < kFar && v.size(d) >= 1;
    const int64_t room = fits ? x.size(d) + 2 * padding - dilation * (v.size(d) - 1) - 1 : 0;
    fits = fits && room >= 0 && t.size(d) == room / stride + 1;
  }
  STD_TORCH_CHECK(fits, "conv: ", name, " must have the dtype of x and the shape of the output");
}

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

bool same_layout(const Tensor& a, const Tensor& b) {
  return std::equal(a.strides().begin(), a.strides().end(), b.strides().begin(), b.strides().end());
}

// A tensor in the layout of `like`, copied only where it has another.
Tensor laid_out_as(const Tensor& t, const Tensor& like) {
  if (same_layout(t, like)) return t;
  Tensor copy = empty_as(like, t.scalar_type());
  torch::stable::copy_(copy, t);
  return copy;
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

// The layer as conv_layer.h describes one; nothing where that has no word for it.
std::optional<ConvShape> conv_shape(const Tensor& x, const Tensor& v, const Sliding& at) {
  const bool known = v.dim() <= 4 && x.size(1) == v.size(1) * at.groups &&
                     x.scalar_type() == ScalarType::Float && v.scalar_type() == ScalarType::Float;
  if (!known) return std::nullopt;
  const int64_t last = v.dim() - 1;
  const bool flat = v.dim() == 3;
  const auto pair = [&](const Extents& extents, int64_t one) { return Pair{flat ? one : extents[0], extents.back()}; };
  return ConvShape{x.size(0), x.size(1), v.size(0), {flat ? 1 : x.size(2), x.size(last)},
                   {flat ? 1 : v.size(2), v.size(last)}, pair(at.stride, 1), pair(at.padding, 0), pair(at.dilation, 1),
                   at.groups};
}

// Kernels of this library that run the layer; nothing where that is left to the vendor's.
std::optional<ConvLayer> own_layer(const Tensor& x, const Tensor& v, const Sliding& at) {
  const std::optional<ConvShape> shape = conv_shape(x, v, at);
  if (!shape) return std::nullopt;
  const std::optional<Method> method = conv_layer_method(*shape, false);
  if (!method) return std::nullopt;
  return ConvLayer{*shape, false, *method, x, v, nullptr, nullptr, Activation::kNone, 0.0f};
}

// v in an order of rows that the Winograd methods know.
Tensor rows_for(const ConvLayer& layer) {
  const Tensor& v = layer.v;
  const bool known = v.is_contiguous() || v.size(1) % kLanes == 0 || layer.method == Method::kDirect;
  return known ? v : torch::stable::contiguous(v);
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
  if (std::optional<ConvLayer> found = own_layer(x, v, window)) {
    const ConvShape& shape = found->shape;
    const Pair size = shape.output_size();
    const bool last = suggests_channels_last(x) || suggests_channels_last(v);
    const Tensor y = empty_map(shape.images, channels, size.row, size.column, v.dim() == 3, last);
    const Tensor rows = rows_for(*found);
    check_residual(residual_given, y);
    const ConvLayer layer{shape, false, found->method, x, rows, gain, bias ? floats_of(*bias, held_bias) : nullptr, act,
                          static_cast<float>(slope)};
    if (run_conv_layer(layer, residual_given, y, norms)) return {y, norm};
  }
  const bool passes = act != Activation::kNone || residual_given;
  if (!half && passes) {
    row_norms(v, norms, 0, channels);
    const std::vector<float> scale = scales_of(gain, norms, channels);
    if (all_can_wait(scale)) {
      std::vector<float> added(channels, 0.0f);
      if (bias) std::copy_n(floats_of(*bias, held_bias), channels, added.begin());
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

  // A bias gradient without that of the weight would need a pass of its own.
  const bool products = need_x || need_v, bias_alone = need_bias && !need_v;
  const std::optional<ConvLayer> found = products && !bias_alone ? own_layer(x, v, window) : std::nullopt;
  if (found) {
    const ConvShape& shape = found->shape;
    const Pair size = shape.output_size();
    const bool flat = v.dim() == 3, last = suggests_channels_last(x) || suggests_channels_last(v);
    const Tensor rows = rows_for(*found);
    const ConvLayer layer{shape, false, found->method, x, rows, gain, nullptr, static_cast<Activation>(activation),
                          static_cast<float>(slope)};
    Rounded dgain(sizes_of(g), g.scalar_type());
    std::optional<Tensor> dx, dv, db, dz;
    if (need_x) dx = empty_map(shape.images, shape.inputs, shape.size.row, shape.size.column, flat, last);
    if (need_v) dv = empty_as(rows);
    if (need_bias) db = empty({channels}, ScalarType::Float);
    if (need_residual && masked)
      dz = empty_map(shape.images, channels, size.row, size.column, flat, is_channels_last(y));
    float* dbias = db ? static_cast<float*>(db->mutable_data_ptr()) : nullptr;
    if (run_conv_layer_backward(layer, dy_given, y, norms, {dx, dv, dz, dgain.data(), dbias})) {
      if (dv) dv = laid_out_as(*dv, v);
      return {dx, dv, need_v ? Gradient(dgain.tensor()) : Gradient(), db, dz};
    }
  }
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

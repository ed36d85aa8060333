// plain_conv: y = act(conv(x, w) + b + residual) with a weight that is given as it is, where the kernels of this
// library take the layer: weights that are normalised along another dim than their rows
// (wnfused/backends/native_composed.py).
#include <torch/csrc/stable/library.h>

#include "cpu/layer/checks.h"
#include "cpu/layer/formats.h"
#include "cpu/layer/gains.h"
#include "cpu/ops/conv_routes.h"
#include "ops.h"

namespace wnfused {
namespace {

using namespace cpu;

// Float32, or maps in bfloat16, with rows that the kernels read; everything else is left to the vendor's.
bool are_ours(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias) {
  const auto fits = [&](const Tensor& t) {
    return t.scalar_type() == ScalarType::Float || (is_bfloat16(x) && is_bfloat16(t));
  };
  return fits(x) && fits(w) && has_dense_rows(w) && (!bias || fits(*bias));
}

}  // namespace

std::optional<Tensor> plain_conv(
    const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
    const Extents& stride, const Extents& padding, const Extents& dilation, int64_t groups, int64_t activation,
    double slope) {
  const Sliding window{stride, padding, dilation, groups};
  check_window(x, w, window);
  check_activation(activation, slope);
  if (!are_ours(x, w, bias)) return std::nullopt;
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == w.size(0)), "conv: bias must have one entry a row");
  std::vector<float> held;
  const ConvCall conv{conv_shape(x, w, window), x, w, nullptr, bias ? floats_of(*bias, held) : nullptr, window,
                      static_cast<Activation>(activation), static_cast<float>(slope)};
  const ConvChoice choice = choose_forward(traits_of(conv), {activation != Activation::kNone || residual, false});
  return choice.way == ConvWay::kOwn ? own_conv(conv, choice.method, residual, nullptr) : std::nullopt;
}

std::tuple<bool, Gradient, Gradient, Gradient, Gradient> plain_conv_backward(
    const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& w, int64_t needs, const Extents& stride,
    const Extents& padding, const Extents& dilation, int64_t groups, int64_t activation, double slope) {
  const Sliding window{stride, padding, dilation, groups};
  check_window(x, w, window);
  check_activation(activation, slope);
  if (!are_ours(x, w, std::nullopt)) return {};
  check_output(dy, "dy", x, w, window);
  if (activation != Activation::kNone) check_output(y, "y", x, w, window);
  const ConvCall conv{conv_shape(x, w, window), x, w, nullptr, nullptr, window, static_cast<Activation>(activation),
                      static_cast<float>(slope)};
  const ConvChoice choice = choose_backward(traits_of(conv), Needs::of(needs));
  if (choice.way != ConvWay::kOwn) return {};
  const std::optional<LayerGradients> found =
      own_conv_backward(conv, choice.method, dy, y, nullptr, Needs::of(needs), nullptr);
  if (!found) return {};
  return {true, found->dx, found->dv, found->dbias, found->dz};
}

}  // namespace wnfused

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CPU, library) {
  library.impl("plain_conv", TORCH_BOX(&wnfused::plain_conv));
  library.impl("plain_conv_backward", TORCH_BOX(&wnfused::plain_conv_backward));
}

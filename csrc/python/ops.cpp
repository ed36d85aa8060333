// The layers and stages of torch.ops.wnfused on CPU tensors, past Python: what a graph of torch.compile calls once a
// layer.
//
// Python has each of these ops as well, in torch.ops.wnfused_python: there wnfused/dispatch.py chooses the backend, and
// wnfused/ops brings what it gives into form. Here, a call that Python would hand to one kernel of the native backend
// goes straight to that. Any other goes to Python. A test holds both to the same results.
#include <pybind11/gil_safe_call_once.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "activation_number.h"
#include "autograd/formats.h"
#include "autograd/op.h"

namespace wnfused {
namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;
using Optional = std::optional<Tensor>;
using Outputs = std::tuple<Tensor, Tensor>;                             // y, norm
using Gradients =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;             // dx, dv, dg, dbias, dz; empty where not asked for
using StageOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor>;    // y, norm, maps, signs
using StageGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // dx, dv, dg, dbias
using Found = std::tuple<Optional, Optional, Optional, Optional, Optional>;
using Asked = c10::List<bool>;  // of x, of v and g, of the bias, of the residual

// Dtypes of operands are settled before an op is called; autocast must not touch what a kernel does inside.
using NoAutocast = c10::impl::ExcludeDispatchKeyGuard;

bool prefers_native() {
  const pybind11::gil_scoped_acquire gil;
  PYBIND11_CONSTINIT static pybind11::gil_safe_call_once_and_store<pybind11::module_> dispatch;
  dispatch.call_once_and_store_result([] { return pybind11::module_::import("wnfused.dispatch"); });
  return dispatch.get_stored().attr("prefers_native")().cast<bool>();
}

bool has_kernels(const Tensor& t) {
  return t.is_cpu() && (t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16);
}
bool has_kernels(const Optional& t) { return !t || has_kernels(*t); }

// Whether tensors go to the native backend, and its kernels take their dtypes.
template <class... Tensors>
bool are_native(const Tensors&... tensors) {
  return (has_kernels(tensors) && ...) && prefers_native();
}

// Whether the rows that are normalised lie along the first dim, as kernels have them.
bool has_rows_first(std::optional<int64_t> dim, const Tensor& v) { return dim && (*dim == 0 || *dim == -v.dim()); }

// An activation as kernels know it; an unknown one goes to Python, which raises an error.
std::optional<int64_t> number_of(std::string_view activation) {
  int64_t number = 0;
  for (const std::string_view name : kActivationNames) {
    if (activation == name) return number;
    ++number;
  }
  return std::nullopt;
}

int64_t bits_of(const Asked& asked) {
  int64_t bits = 0;
  for (size_t i = 0; i < asked.size(); ++i) bits |= int64_t{asked.get(i)} << i;
  return bits;
}

Gradients in_form(const Found& found, const Tensor& dy, const Tensor& x, const Tensor& v) {
  const auto& [dx, dv, dg, dbias, dz] = found;
  const auto given = [&](const Optional& gradient) { return gradient ? *gradient : dy.new_empty({0}); };
  const auto like = [&](const Optional& gradient, const Tensor& model) {
    return gradient ? gradient->contiguous(formats::of(model)) : given(gradient);
  };
  return {like(dx, x), like(dv, v), given(dg), given(dbias), like(dz, dy)};
}

Outputs linear(
    const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias, const Optional& residual,
    std::optional<int64_t> dim, c10::string_view activation, double slope) {
  using Kernel =
      Outputs(const Tensor&, const Tensor&, const Tensor&, const Optional&, const Optional&, int64_t, double);
  static const auto kernel = op<Kernel>(LinearNames::kForward);
  static const auto python = op<decltype(linear)>("wnfused_python::linear");
  const std::optional<int64_t> number = number_of(activation);
  if (!number || !has_rows_first(dim, v) || !are_native(x, v, g, bias, residual))
    return python.call(x, v, g, bias, residual, dim, activation, slope);
  const NoAutocast guard(c10::autocast_dispatch_keyset);
  return kernel.call(x, v, g, bias, residual, *number, slope);
}

Gradients linear_backward(const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& v, const Tensor& g,
                          const Tensor& norm, Asked needs, std::optional<int64_t> dim, c10::string_view activation,
                          double slope) {
  using Kernel = Found(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                       int64_t, int64_t, double);
  static const auto kernel = op<Kernel>(LinearNames::kBackward);
  static const auto python = op<decltype(linear_backward)>("wnfused_python::linear_backward");
  const std::optional<int64_t> number = number_of(activation);
  if (!number || !has_rows_first(dim, v) || !are_native(dy, y, x, v, g, norm))
    return python.call(dy, y, x, v, g, norm, needs, dim, activation, slope);
  const NoAutocast guard(c10::autocast_dispatch_keyset);
  return in_form(kernel.call(dy, y, x, v, g, norm, bits_of(needs), *number, slope), dy, x, v);
}

Outputs conv_natively(const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias,
                      const Optional& residual, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                      bool transposed, IntArrayRef output_padding, int64_t groups, int64_t activation, double slope) {
  using Kernel = Outputs(const Tensor&, const Tensor&, const Tensor&, const Optional&, const Optional&, IntArrayRef,
                         IntArrayRef, IntArrayRef, int64_t, int64_t, double);
  using Transposed = Outputs(const Tensor&, const Tensor&, const Tensor&, const Optional&, const Optional&, IntArrayRef,
                             IntArrayRef, IntArrayRef, IntArrayRef, int64_t, int64_t, double);
  static const auto kernel = op<Kernel>(ConvNames::kForward);
  static const auto kernel_of_transposed = op<Transposed>(ConvTransposeNames::kForward);
  if (!transposed) return kernel.call(x, v, g, bias, residual, stride, padding, dilation, groups, activation, slope);
  return kernel_of_transposed.call(
      x, v, g, bias, residual, stride, padding, dilation, output_padding, groups, activation, slope);
}

Found conv_backward_natively(const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& v, const Tensor& g,
                             const Tensor& norm, int64_t needs, IntArrayRef stride, IntArrayRef padding,
                             IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups,
                             int64_t activation, double slope) {
  using Kernel = Found(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, IntArrayRef,
      IntArrayRef, IntArrayRef, int64_t, int64_t, double);
  using Transposed = Found(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, IntArrayRef,
      IntArrayRef, IntArrayRef, IntArrayRef, int64_t, int64_t, double);
  static const auto kernel = op<Kernel>(ConvNames::kBackward);
  static const auto kernel_of_transposed = op<Transposed>(ConvTransposeNames::kBackward);
  if (!transposed)
    return kernel.call(dy, y, x, v, g, norm, needs, stride, padding, dilation, groups, activation, slope);
  return kernel_of_transposed.call(
      dy, y, x, v, g, norm, needs, stride, padding, dilation, output_padding, groups, activation, slope);
}

Outputs conv(const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias, const Optional& residual,
             SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed,
             SymIntArrayRef output_padding, SymInt groups, std::optional<int64_t> dim, c10::string_view activation,
             double slope) {
  static const auto python = op<decltype(conv)>("wnfused_python::conv");
  const std::optional<int64_t> number = number_of(activation);
  if (number && has_rows_first(dim, v) && are_native(x, v, g, bias, residual)) {
    const NoAutocast guard(c10::autocast_dispatch_keyset);
    const auto [y, norm] =
        conv_natively(x, v, g, bias, residual, C10_AS_INTARRAYREF_SLOW(stride), C10_AS_INTARRAYREF_SLOW(padding),
                      C10_AS_INTARRAYREF_SLOW(dilation), transposed, C10_AS_INTARRAYREF_SLOW(output_padding),
                      groups.expect_int(), *number, slope);
    return {y.contiguous(formats::of(x, v)), norm};
  }
  return python.call(
      x, v, g, bias, residual, stride, padding, dilation, transposed, output_padding, groups, dim, activation, slope);
}

Gradients conv_backward(const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& v, const Tensor& g,
                        const Tensor& norm, Asked needs, SymIntArrayRef stride, SymIntArrayRef padding,
                        SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding, SymInt groups,
                        std::optional<int64_t> dim, c10::string_view activation, double slope) {
  static const auto python = op<decltype(conv_backward)>("wnfused_python::conv_backward");
  const std::optional<int64_t> number = number_of(activation);
  if (number && has_rows_first(dim, v) && are_native(dy, y, x, v, g, norm)) {
    const NoAutocast guard(c10::autocast_dispatch_keyset);
    const auto found =
        conv_backward_natively(dy, y, x, v, g, norm, bits_of(needs), C10_AS_INTARRAYREF_SLOW(stride),
                               C10_AS_INTARRAYREF_SLOW(padding), C10_AS_INTARRAYREF_SLOW(dilation), transposed,
                               C10_AS_INTARRAYREF_SLOW(output_padding), groups.expect_int(), *number, slope);
    return in_form(found, dy, x, v);
  }
  return python.call(dy, y, x, v, g, norm, needs, stride, padding, dilation, transposed, output_padding, groups, dim,
                     activation, slope);
}

StageOutputs residual_stage(
    const Tensor& x, const Tensor& v, const Tensor& g, const Tensor& bias, double skip_scale, int64_t recompute,
    bool save) {
  using Kernel = std::tuple<Tensor, Tensor, Tensor>(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, double, int64_t, bool);
  static const auto kernel = op<Kernel>(StageNames::kForward);
  static const auto python = op<decltype(residual_stage)>("wnfused_python::residual_stage");
  if (!are_native(x, v, g, bias)) return python.call(x, v, g, bias, skip_scale, recompute, save);
  const NoAutocast guard(c10::autocast_dispatch_keyset);
  const auto [y, norm, maps] = kernel.call(x, v, g, bias, skip_scale, recompute, save);
  return {y, norm, maps, at::empty({0}, x.options().dtype(at::kByte))};
}

StageGradients residual_stage_backward(
    const Tensor& dy, const Tensor& v, const Tensor& g, const Tensor& bias, const Tensor& norm, const Tensor& maps,
    double skip_scale, int64_t recompute, bool parameters, const Optional& signs) {
  using Kernel = StageGradients(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, double, int64_t, bool);
  static const auto kernel = op<Kernel>(StageNames::kBackward);
  static const auto python = op<decltype(residual_stage_backward)>("wnfused_python::residual_stage_backward");
  if (!are_native(dy, v, g, bias, norm, maps))
    return python.call(dy, v, g, bias, norm, maps, skip_scale, recompute, parameters, signs);
  const NoAutocast guard(c10::autocast_dispatch_keyset);
  return kernel.call(dy, v, g, bias, norm, maps, skip_scale, recompute, parameters);
}

// Whether autograd records a call with these arguments.
bool is_recorded(const torch::jit::Stack& stack, size_t arguments) {
  if (!at::GradMode::is_enabled()) return false;
  for (size_t i = stack.size() - arguments; i < stack.size(); ++i) {
    if (stack[i].isTensor() && stack[i].toTensor().requires_grad()) return true;
  }
  return false;
}

// Python records these ops; it is asked only where there is something to record. A compiled graph never has that: its
// own node is around all of it.
void record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (is_recorded(*stack, op.schema().arguments().size())) {
    // It registered its kernel for autograd on any backend. This one hides that from CPU tensors; a backend without a
    // key of its own still has it.
    constexpr c10::DispatchKeySet kBelow(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::AutogradFunctionality);
    op.redispatchBoxed((keys & kBelow) | c10::DispatchKeySet(c10::DispatchKey::AutogradOther), stack);
  } else {
    const at::AutoDispatchBelowAutograd guard;
    op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  }
}

}  // namespace
}  // namespace wnfused

// The schemas stand in wnfused/ops.
TORCH_LIBRARY_IMPL(wnfused, CPU, library) {
  using namespace wnfused;
  library.impl("linear", linear);
  library.impl("linear_backward", linear_backward);
  library.impl("conv", conv);
  library.impl("conv_backward", conv_backward);
  library.impl("residual_stage", residual_stage);
  library.impl("residual_stage_backward", residual_stage_backward);
}

TORCH_LIBRARY_IMPL(wnfused, AutogradCPU, library) {
  for (const char* name : {"linear", "conv", "residual_stage"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&wnfused::record>());
}

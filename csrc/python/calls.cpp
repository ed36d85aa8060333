// wnfused._python: layers and stages called from Python, past the checks and the parsing of arguments that Python and
// torch's op objects do. Those cost a layer of 64 features as much as its kernel.
//
// A function here gives None where the call is not a plain one, and wnfused/ops/_direct.py takes its slower way. What
// is plain stands there (`is_plain_call`, `is_open_to_layers`, `is_open_to_stages`), and here once more: a test asks
// both.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/object_ptr.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "autograd/node.h"
#include "autograd/op.h"

namespace wnfused {
namespace {

using at::IntArrayRef;
using at::Tensor;
using Optional = std::optional<Tensor>;

// The type of the mode for torch's functions that a default device is; calls of layers are not for that one.
PyObject* device_context = nullptr;

bool is_seen_by_a_function_mode() {
  using Modes = at::impl::PythonTorchFunctionTLS;
  for (int64_t i = 0; i < Modes::stack_len(); ++i) {
    PyObject* mode = Modes::get_stack_at(i)->ptr(getPyInterpreter());
    if (reinterpret_cast<PyObject*>(Py_TYPE(mode)) != device_context) return true;
  }
  return false;
}

// Whether a mode would want to know of the call.
bool is_watched() {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() || is_seen_by_a_function_mode() ||
         torch::jit::tracer::isTracing();
}

bool has_tangents() { return torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr; }

// Exactly torch.Tensor or torch.nn.Parameter: a subclass may answer for itself.
bool is_plain(PyObject* object) { return THPVariable_CheckExact(object); }

// The tensors of a layer or stage, and whether the kernels take them.
class Inputs {
 public:
  // Of x, v, g, bias and, where there are five, the residual; the last two None where there are none.
  static std::optional<Inputs> read(PyObject* const* objects, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      if (!is_plain(objects[i]) && (i < 3 || objects[i] != Py_None)) return std::nullopt;
    }
    Inputs given{tensor(objects[0]), tensor(objects[1]), tensor(objects[2]), optional(objects[3]),
                 count > 4 ? optional(objects[4]) : Optional()};
    if (!(is_transformed() ? given.are_composed() : given.are_open())) return std::nullopt;
    return given;
  }

  // As autocast would have it; recorded, where gradients are.
  void cast() {
    if (!casts_) return;
    x = x.to(dtype_);
    if (residual && residual->is_floating_point() && residual->scalar_type() != at::kDouble)
      residual = residual->to(dtype_);
  }

  // Whether autograd records what is made of x and the residual.
  bool is_recorded() const {
    return at::GradMode::is_enabled() && (x.requires_grad() || (residual && residual->requires_grad()));
  }

  // No kernel takes these; what records a layer runs it as torch's product.
  bool have_no_kernel() const { return dtype_ == at::kDouble || is_transformed(); }

  Tensor x, v, g;
  Optional bias, residual;

 private:
  Inputs(Tensor x, Tensor v, Tensor g, Optional bias, Optional residual)
      : x(std::move(x)), v(std::move(v)), g(std::move(g)), bias(std::move(bias)), residual(std::move(residual)) {
    const at::DeviceType device = this->x.device().type();
    const bool has_autocast = this->x.is_cpu() || this->x.is_cuda();  // of others, torch raises an error where asked
    dtype_ = this->x.scalar_type();
    casts_ = has_autocast && this->x.is_floating_point() && dtype_ != at::kDouble &&
             at::autocast::is_autocast_enabled(device);
    if (casts_) dtype_ = at::autocast::get_autocast_dtype(device);
  }

  static const Tensor& tensor(PyObject* object) { return THPVariable_Unpack(object); }
  static Optional optional(PyObject* object) { return object == Py_None ? Optional() : Optional(tensor(object)); }

  bool are_composed() const {
    const auto fits = [&](const Tensor& t) { return t.is_cpu() && t.scalar_type() == dtype_; };
    return (dtype_ == at::kFloat || dtype_ == at::kDouble) && fits(x) && v.numel() > 0 && fits(v) && fits(g) &&
           (!bias || fits(*bias)) && (!residual || fits(*residual));
  }

  bool are_open() const {
    if (x.is_cpu() && dtype_ == at::kDouble) return are_composed();
    if (x.is_cpu()) {
      const bool fit = !casts_ || (is_open_on_cpu(dtype_) && is_open_on_cpu(v.scalar_type()) &&
                                   is_open_on_cpu(g.scalar_type()) && (!bias || is_open_on_cpu(bias->scalar_type())));
      return is_open_on_cpu(x.scalar_type()) && fit;
    }
    if (!x.is_cuda() || x.numel() == 0 || v.numel() == 0) return false;
    const auto known = [&](const Tensor& t) { return t.scalar_type() == dtype_ || t.scalar_type() == at::kFloat; };
    const bool has_kernels = dtype_ == at::kFloat || dtype_ == at::kBFloat16 || dtype_ == at::kHalf;
    return has_kernels && known(v) && g.scalar_type() == v.scalar_type() && (!bias || known(*bias));
  }

  static bool is_open_on_cpu(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kBFloat16; }

  at::ScalarType dtype_;
  bool casts_;
};

// The constants of a layer: exactly Python's own ints, floats and tuples, as torch would convert any other.
template <class T>
struct Constant;

template <>
struct Constant<int64_t> {
  bool read(PyObject* object) {
    if (!PyLong_CheckExact(object)) return false;
    int overflow = 0;
    value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow == 0;
  }
  int64_t value = 0;
};

template <>
struct Constant<double> {
  bool read(PyObject* object) {
    if (!PyFloat_CheckExact(object)) return false;
    value = PyFloat_AS_DOUBLE(object);
    return true;
  }
  double value = 0;
};

template <>
struct Constant<IntArrayRef> {
  bool read(PyObject* object) {
    if (!PyTuple_CheckExact(object) || PyTuple_GET_SIZE(object) > Py_ssize_t{kMostDims}) return false;
    const size_t size = static_cast<size_t>(PyTuple_GET_SIZE(object));
    for (size_t i = 0; i < size; ++i) {
      Constant<int64_t> entry;
      if (!entry.read(PyTuple_GET_ITEM(object, static_cast<Py_ssize_t>(i)))) return false;
      entries[i] = entry.value;
    }
    value = IntArrayRef(entries, size);
    return true;
  }
  static constexpr size_t kMostDims = 3;
  int64_t entries[kMostDims];
  IntArrayRef value;
};

template <class Result, class... Constants>
using Signature =
    Result(const Tensor&, const Tensor&, const Tensor&, const Optional&, const Optional&, Constants...);

template <class Result, class... Constants>
Result call(c10::TypedOperatorHandle<Signature<Result, Constants...>> op, const Inputs& in, Constants... constants) {
  return op.call(in.x, in.v, in.g, in.bias, in.residual, constants...);
}

// A kind of layer whose kernels take every call that is open.
template <class Names, class... Constants>
struct Layer {
  static constexpr size_t kTensors = 5;
  static constexpr bool kIsComposed = true;

  static bool takes(const Inputs&) { return true; }

  static Tensor forward(const Inputs& in, Constants... constants) {
    static const auto native = op<Signature<std::tuple<Tensor, Tensor>, Constants...>>(Names::kForward);
    return std::get<0>(call(native, in, constants...));
  }
  static Tensor recorded(const Inputs& in, Constants... constants) {
    static const auto recorded = op<Signature<Tensor, Constants...>>(Names::kRecorded);
    return call(recorded, in, constants...);
  }
};

// Composed of kernels for float32, dense parameters and no autocast.
template <class... Constants>
struct LinearOfNorm : Layer<LinearOfNormNames, Constants...> {
  static bool takes(const Inputs& in) {
    const auto fits = [](const Tensor& t) { return t.is_cpu() && t.scalar_type() == at::kFloat; };
    return fits(in.x) && fits(in.v) && fits(in.g) && in.v.dim() == 2 && in.v.numel() > 0 && in.v.is_contiguous() &&
           (!in.bias || fits(*in.bias)) && (!in.residual || fits(*in.residual)) &&
           !at::autocast::is_autocast_enabled(at::kCPU);
  }
};

// Those of CPU tensors.
template <class... Constants>
struct ConvTranspose : Layer<ConvTransposeNames, Constants...> {
  static bool takes(const Inputs& in) { return in.x.is_cpu(); }
};

// The stages of CPU tensors. Those of a GPU, whose node is Python's, are few beside their kernels.
template <class... Constants>
struct Stage {
  static constexpr size_t kTensors = 4;
  static constexpr bool kIsComposed = false;

  static bool takes(const Inputs& in) { return in.x.is_cpu() && in.x.dim() == 4 && in.bias; }

  static Tensor forward(const Inputs& in, Constants... constants) {
    using Found = std::tuple<Tensor, Tensor, Tensor>(
        const Tensor&, const Tensor&, const Tensor&, const Tensor&, Constants..., bool save);
    static const auto native = op<Found>(StageNames::kForward);
    return std::get<0>(native.call(in.x, in.v, in.g, *in.bias, constants..., false));
  }
  // Maps are kept for a backward alone.
  static Tensor recorded(const Inputs& in, Constants... constants) {
    using Found = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, Constants...);
    static const auto recorded = op<Found>(StageNames::kRecorded);
    const bool has_backward =
        in.x.requires_grad() || in.v.requires_grad() || in.g.requires_grad() || in.bias->requires_grad();
    return has_backward ? recorded.call(in.x, in.v, in.g, *in.bias, constants...) : forward(in, constants...);
  }
};

// (*tensors, *constants) -> y, or None
template <class Run, class... Constants, size_t... I>
PyObject* layer(PyObject* const* objects, Py_ssize_t count, std::index_sequence<I...>) {
  HANDLE_TH_ERRORS
  constexpr size_t kTensors = Run::kTensors;
  const bool has_tangents_alone = has_tangents() && !is_transformed();
  if (count != kTensors + sizeof...(Constants) || is_watched() || has_tangents_alone) Py_RETURN_NONE;
  std::optional<Inputs> in = Inputs::read(objects, kTensors);
  std::tuple<Constant<Constants>...> constants;
  if (!in || !(in->have_no_kernel() ? Run::kIsComposed : Run::takes(*in))) Py_RETURN_NONE;
  if (!(std::get<I>(constants).read(objects[kTensors + I]) && ...)) Py_RETURN_NONE;
  Tensor y;
  {
    pybind11::gil_scoped_release no_gil;
    in->cast();
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const bool records = at::GradMode::is_enabled() || in->have_no_kernel();
    y = records ? Run::recorded(*in, std::get<I>(constants).value...)
                : Run::forward(*in, std::get<I>(constants).value...);
    in.reset();
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

template <class Run, class... Constants>
PyObject* function(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  return layer<Run, Constants...>(objects, count, std::index_sequence_for<Constants...>());
}

// METH_FASTCALL's type of function, as the table of methods holds it.
template <template <class...> class Run, class... Constants>
PyCFunction entry() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&function<Run<Constants...>, Constants...>));
}

// A convolution on weights that were packed before.
struct KeptConv {
  static constexpr const char* kName = "wnfused_native::kept_conv";
};
struct KeptConvTranspose {
  static constexpr const char* kName = "wnfused_native::kept_conv_transpose";
};

// Exactly a list of tensors.
std::optional<std::vector<Tensor>> read_tensors(PyObject* object) {
  if (!PyList_CheckExact(object)) return std::nullopt;
  std::vector<Tensor> tensors;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object); ++i) {
    PyObject* entry = PyList_GET_ITEM(object, i);
    if (!is_plain(entry)) return std::nullopt;
    tensors.push_back(THPVariable_Unpack(entry));
  }
  return tensors;
}

// Whether a list has a bank like this one, that a call in another thread has packed meanwhile: of one size, and of one
// method of multiplying, which its last entry tells (kept_banks.cpp).
bool has_bank_like(PyObject* banks, const Tensor& bank) {
  const auto method = [](const Tensor& t) { return t.const_data_ptr<float>()[t.numel() - 1]; };
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(banks); ++i) {
    const Tensor& known = THPVariable_Unpack(PyList_GET_ITEM(banks, i));
    if (known.numel() == bank.numel() && method(known) == method(bank)) return true;
  }
  return false;
}

// (x, v, g, bias, residual, banks, *constants) -> y, or None. What the call packs joins the banks.
template <class Run, class... Constants, size_t... I>
PyObject* kept(PyObject* const* objects, Py_ssize_t count, std::index_sequence<I...>) {
  HANDLE_TH_ERRORS
  constexpr size_t kTensors = 5;
  const bool is_moved = has_tangents() || is_transformed();
  if (count != kTensors + 1 + sizeof...(Constants) || is_watched() || is_moved) Py_RETURN_NONE;
  std::optional<Inputs> in = Inputs::read(objects, kTensors);
  const std::optional<std::vector<Tensor>> banks = read_tensors(objects[kTensors]);
  std::tuple<Constant<Constants>...> constants;
  const bool fit = in && banks && in->x.is_cpu() && !in->have_no_kernel() && in->x.dim() == in->v.dim();
  if (!fit || in->is_recorded()) Py_RETURN_NONE;
  if (!(std::get<I>(constants).read(objects[kTensors + 1 + I]) && ...)) Py_RETURN_NONE;
  Tensor y;
  Optional bank;
  {
    pybind11::gil_scoped_release no_gil;
    in->cast();
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    using Found = std::tuple<Tensor, Optional>(
        const Tensor&, const Tensor&, const Tensor&, const Optional&, const Optional&, at::TensorList, Constants...);
    static const auto native = op<Found>(Run::kName);
    std::tie(y, bank) =
        native.call(in->x, in->v, in->g, in->bias, in->residual, *banks, std::get<I>(constants).value...);
    in.reset();
  }
  if (bank && !has_bank_like(objects[kTensors], *bank)) {
    THPObjectPtr packed(THPVariable_Wrap(std::move(*bank)));
    if (!packed || PyList_Append(objects[kTensors], packed.get()) != 0) return nullptr;
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

template <class Run, class... Constants>
PyObject* kept_function(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  return kept<Run, Constants...>(objects, count, std::index_sequence_for<Constants...>());
}

template <class Run, class... Constants>
PyCFunction kept_entry() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&kept_function<Run, Constants...>));
}

template <class... Constants>
using Linear = Layer<LinearNames, Constants...>;
template <class... Constants>
using Conv = Layer<ConvNames, Constants...>;

}  // namespace
}  // namespace wnfused

PyMODINIT_FUNC PyInit__python() {
  using namespace wnfused;
  static PyMethodDef methods[] = {
      {"linear", entry<Linear, int64_t, double>(), METH_FASTCALL,
       "(x, v, g, bias, residual, activation, negative_slope): y, or None where the call is no plain one."},
      {"linear_of_norm", entry<LinearOfNorm, int64_t, int64_t, double>(), METH_FASTCALL,
       "(x, v, g, bias, residual, dim, activation, negative_slope): y, or None where the call is no plain one."},
      {"conv", entry<Conv, IntArrayRef, IntArrayRef, IntArrayRef, int64_t, int64_t, double>(), METH_FASTCALL,
       "(x, v, g, bias, residual, stride, padding, dilation, groups, activation, negative_slope): y, or None where the "
       "call is no plain one."},
      {"conv_transpose",
       entry<ConvTranspose, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, int64_t, int64_t, double>(),
       METH_FASTCALL,
       "(x, v, g, bias, residual, stride, padding, dilation, output_padding, groups, activation, negative_slope): y, "
       "or None where the call is no plain one."},
      {"kept_conv", kept_entry<KeptConv, IntArrayRef, IntArrayRef, IntArrayRef, int64_t, int64_t, double>(),
       METH_FASTCALL,
       "(x, v, g, bias, residual, banks, stride, padding, dilation, groups, activation, negative_slope): y, or None "
       "where the call is no plain one."},
      {"kept_conv_transpose",
       kept_entry<KeptConvTranspose, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, int64_t, int64_t, double>(),
       METH_FASTCALL,
       "(x, v, g, bias, residual, banks, stride, padding, dilation, output_padding, groups, activation, "
       "negative_slope): y, or None where the call is no plain one."},
      {"residual_stage", entry<Stage, double, int64_t>(), METH_FASTCALL,
       "(x, v, g, bias, skip_scale, recompute): y, or None where the call is no plain one."},
      {nullptr, nullptr, 0, nullptr}};
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_python", "Layers and stages, past Python's argument parsing.", -1, methods,
      nullptr, nullptr, nullptr, nullptr};
  PyObject* devices = PyImport_ImportModule("torch.utils._device");
  if (!devices) return nullptr;
  device_context = PyObject_GetAttrString(devices, "DeviceContext");
  Py_DECREF(devices);
  return device_context ? PyModule_Create(&definition) : nullptr;
}

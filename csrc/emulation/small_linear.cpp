// The linear layers of few samples on the host. bfloat16 arrays are passed as uint16; `kind`: of the product,
// "bfloat16", "tf32" or "float32".
#include "emulation/arrays.h"
#include "emulation/kernels.h"

namespace wnfused::gpu {
namespace {

template <class T, class N>
SmallLinearParams<T, N> params_of(const py::array& v, const py::array& g, const py::array& norm, int64_t samples,
                                  bool activates, float slope) {
  SmallLinearParams<T, N> params{};
  params.v = static_cast<T*>(pointer_of(v));
  params.g = static_cast<T*>(pointer_of(g));
  params.norm = static_cast<float*>(pointer_of(norm));
  params.activates = activates;
  params.slope = slope;
  params.samples = static_cast<int>(samples);
  params.rows = static_cast<int>(v.shape(0));
  params.columns = static_cast<int>(v.shape(1));
  return params;
}

// Calls body with a product's kind, a value of v's type and one of x's.
template <class Body>
std::vector<std::string> for_kind(const std::string& kind, const py::array& v, const Body& body) {
  if (kind == "tf32") return body(Tf32{}, float{}, float{});
  if (kind == "float32") return body(Float32{}, float{}, float{});
  if (v.itemsize() == 2) return body(Bfloat16{}, BFloat{}, BFloat{});
  return body(Bfloat16{}, float{}, BFloat{});
}

template <class N>
N* optional_pointer(const py::object& array) {
  return array.is_none() ? nullptr : static_cast<N*>(pointer_of(py::cast<py::array>(array)));
}

bool is_float(const py::object& array) { return !array.is_none() && py::cast<py::array>(array).itemsize() == 4; }

std::vector<std::string> forward(const std::string& kind, const py::array& x, const py::array& v, const py::array& g,
                                 const py::object& bias, const py::object& residual, const py::array& y,
                                 const py::array& norm, bool activates, float slope, bool reverse) {
  return for_kind(kind, v, [&](auto product, auto wide, auto narrow) {
    using N = decltype(narrow);
    auto params = params_of<decltype(wide), N>(v, g, norm, x.shape(0), activates, slope);
    params.x = static_cast<N*>(pointer_of(x));
    params.y = static_cast<N*>(pointer_of(y));
    params.residual = optional_pointer<N>(residual);
    params.bias = optional_pointer<void>(bias);
    params.bias_is_float = is_float(bias);
    Run run = run_on(reverse, {x, v, g, bias, residual}, {y, norm});
    return findings_of(run, emulated::small_linear<decltype(product)>(params, &run));
  });
}

// dx, or None; dv, dg and dbias, or None.
std::vector<std::string> backward(const std::string& kind, const py::array& dy, const py::array& y, const py::array& x,
                                  const py::array& v, const py::array& g, const py::array& norm, const py::object& dx,
                                  const py::object& dv, const py::object& dg, const py::object& dbias, bool activates,
                                  float slope, bool reverse) {
  return for_kind(kind, v, [&](auto product, auto wide, auto narrow) {
    using T = decltype(wide);
    using N = decltype(narrow);
    auto params = params_of<T, N>(v, g, norm, x.shape(0), activates, slope);
    params.x = static_cast<N*>(pointer_of(x));
    params.dy = static_cast<N*>(pointer_of(dy));
    params.y_read = static_cast<N*>(pointer_of(y));
    params.dx = optional_pointer<N>(dx);
    params.dv = optional_pointer<T>(dv);
    params.dg = optional_pointer<T>(dg);
    params.dbias = optional_pointer<void>(dbias);
    params.bias_is_float = is_float(dbias);
    Run run = run_on(reverse, {dy, y, x, v, g, norm}, {dx, dv, dg, dbias});
    return findings_of(run, emulated::small_linear_backward<decltype(product)>(params, &run));
  });
}

}  // namespace

void add_small_linear(py::module_& module) {
  module.def("small_linear", &forward);
  module.def("small_linear_backward", &backward);
}

}  // namespace wnfused::gpu

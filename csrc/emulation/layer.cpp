// The kernels beside the vendor's product of a layer, for the tests. uint16 arrays are bfloat16.
#include "emulation/arrays.h"
#include "emulation/kernels.h"

namespace wnfused::gpu {
namespace {

// Forward without dw: v, g and bias (or None) to w, norm and bias_out. With it: dw, v, g and norm to dv (as w) and dg
// (as bias_out), and the sums of partial over shares, unless it is None, to dbias. v is [rows, length]; `fastest`: as
// in LayerWeightParams.
std::vector<std::string> layer_weight(const py::array& v, const py::array& g, const py::object& dw,
                                      const py::object& bias, const py::array& w, const py::array& norm,
                                      const py::array& bias_out, int fastest, const py::object& partial,
                                      const py::object& dbias, bool reverse) {
  const auto call = [&](auto wide, auto narrow) {
    using T = decltype(wide);
    using N = decltype(narrow);
    const bool backward = !dw.is_none();
    LayerWeightParams<T, N> params{};
    params.v = static_cast<T*>(pointer_of(v));
    params.g = static_cast<T*>(pointer_of(g));
    params.norm = static_cast<float*>(pointer_of(norm));
    params.rows = v.shape(0);
    params.length = static_cast<int>(v.shape(1));
    params.fastest = fastest;
    if (backward) {
      params.dw = static_cast<N*>(pointer_of(py::cast<py::array>(dw)));
      params.dv = static_cast<T*>(pointer_of(w));
      params.dg = static_cast<T*>(pointer_of(bias_out));
      if (!partial.is_none()) {
        const auto sums = py::cast<py::array>(partial);
        params.partial = static_cast<float*>(pointer_of(sums));
        params.shares = sums.shape(0);
        params.dbias = static_cast<T*>(pointer_of(py::cast<py::array>(dbias)));
      }
      Run run = run_on(reverse, {v, g, dw, norm, partial}, {w, bias_out, dbias});
      return findings_of(run, emulated::layer_weight<true>(params, &run));
    }
    params.w = static_cast<N*>(pointer_of(w));
    params.bias = bias.is_none() ? nullptr : static_cast<float*>(pointer_of(py::cast<py::array>(bias)));
    params.bias_out = static_cast<N*>(pointer_of(bias_out));
    Run run = run_on(reverse, {v, g, bias}, {w, norm, bias_out});
    return findings_of(run, emulated::layer_weight<false>(params, &run));
  };
  const bool backward = !dw.is_none();
  const py::array product = backward ? py::cast<py::array>(dw) : w;
  if (v.itemsize() == 2) return call(BFloat{}, BFloat{});
  return product.itemsize() == 2 ? call(float{}, BFloat{}) : call(float{}, float{});
}

// y is changed in place.
std::vector<std::string> layer_epilogue(const py::array& y, const py::object& bias, const py::object& residual,
                                        int64_t channels, int64_t inner, bool activates, float slope, bool reverse) {
  const auto call = [&](auto value) {
    using N = decltype(value);
    const auto pointer = [](const py::object& array) {
      return array.is_none() ? nullptr : static_cast<N*>(pointer_of(py::cast<py::array>(array)));
    };
    Run run = run_on(reverse, {bias, residual}, {y});
    const Status status = emulated::layer_epilogue(LayerEpilogueParams<N>{pointer(y), pointer(bias), pointer(residual),
                                                                          y.size(), channels, inner, activates, slope},
                                                   &run);
    return findings_of(run, status);
  };
  return y.itemsize() == 2 ? call(BFloat{}) : call(float{});
}

// y and dz may be None, and partial.
std::vector<std::string> layer_mask(const py::array& dy, const py::object& y, const py::object& dz,
                                    const py::object& partial, int64_t channels, int64_t inner, float slope,
                                    bool reverse) {
  const auto call = [&](auto value) {
    using N = decltype(value);
    const auto pointer = [](const py::object& array) {
      return array.is_none() ? nullptr : pointer_of(py::cast<py::array>(array));
    };
    LayerMaskParams<N> params{};
    params.dy = static_cast<N*>(pointer(dy));
    params.y = static_cast<N*>(pointer(y));
    params.dz = static_cast<N*>(pointer(dz));
    params.partial = static_cast<float*>(pointer(partial));
    params.count = dy.size();
    params.channels = channels;
    params.inner = inner;
    params.slope = slope;
    params.shares = partial.is_none() ? emulated::mask_shares(params) : py::cast<py::array>(partial).shape(0);
    Run run = run_on(reverse, {dy, y}, {dz, partial});
    return findings_of(run, emulated::layer_mask(params, &run));
  };
  return dy.itemsize() == 2 ? call(BFloat{}) : call(float{});
}

}  // namespace

void add_layer(py::module_& module) {
  module.def("layer_epilogue", &layer_epilogue);
  module.def("layer_mask", &layer_mask);
  module.def("layer_weight", &layer_weight);
}

}  // namespace wnfused::gpu

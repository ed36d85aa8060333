// The CUDA kernels on the host, for the tests: numpy arrays in, numpy arrays written, findings of the emulated machine
// out. bfloat16 arrays are passed as uint16.
#include <limits>
#include <stdexcept>

#include "cuda/row_norm.h"
#include "cuda/stage_driver.h"
#include "emulation/arrays.h"

namespace wnfused::gpu {
namespace {

Values values_of(const py::array& array) {
  const bool bfloat16 = array.dtype().is(py::dtype::of<uint16_t>());
  if (!bfloat16 && !array.dtype().is(py::dtype::of<float>())) throw std::invalid_argument("float32 or uint16 only");
  return {pointer_of(array), bfloat16};
}

Values values_of(const py::object& array) {
  return array.is_none() ? Values{nullptr, false} : values_of(py::cast<py::array>(array));
}

uint8_t* bytes_of(const py::object& array) {
  return array.is_none() ? nullptr : static_cast<uint8_t*>(pointer_of(py::cast<py::array>(array)));
}

void* data_of(const py::object& array) { return values_of(array).data; }

// [N, C, H, W] of any strides.
ExternalMap map_of(const py::array& array) {
  const auto stride = [&](int dim) { return static_cast<int64_t>(array.strides(dim) / array.itemsize()); };
  return {values_of(array), stride(0), stride(1), stride(2), stride(3)};
}

const StageEntry* const tables[] = {stage_bfloat16,   stage_tf32,
                                    stage_float32,    stage_large_bfloat16,
                                    stage_large_tf32, stage_warpgroup_bfloat16,
                                    stage_warpgroup_tf32};

const StageEntry& entry_named(const std::string& name) {
  for (const StageEntry* table : tables)
    for (const StageEntry* entry = table; entry->name; ++entry)
      if (name == entry->name) return *entry;
  throw std::invalid_argument("no configuration is named " + name);
}

StageProblem problem_of(const py::array& x, const py::array& v, const py::array& g, const py::array& bias,
                        float skip_scale, int64_t recompute) {
  return {x.shape(0), v.shape(0), skip_scale, recompute, values_of(v), values_of(g), values_of(bias)};
}

// Runs a call in a workspace of NaNs.
template <class Call>
std::vector<std::string> finish(const StageEntry& entry, const Call& call, Run run) {
  const auto bytes = static_cast<std::size_t>(workspace_bytes(entry, call));
  std::vector<char> space(bytes + 256, static_cast<char>(0xff));
  char* base = space.data() + (256 - reinterpret_cast<std::uintptr_t>(space.data()) % 256);
  run.arrays.push_back({base, bytes, true});
  const Status status = enqueue(entry, call, base, &run);
  return findings_of(run, status);
}

py::list entries() {
  py::list all;
  for (const StageEntry* table : tables)
    for (const StageEntry* entry = table; entry->name; ++entry) {
      py::dict facts;
      facts["name"] = entry->name;
      facts["precision"] = static_cast<int>(entry->precision);
      facts["channels"] = entry->channels;
      facts["height"] = entry->height;
      facts["width"] = entry->width;
      facts["images"] = entry->images;
      facts["gradient_images"] = entry->gradient_images;
      facts["shared_bytes"] = entry->shared_bytes;
      facts["sign_bytes"] = sign_bytes(*entry, 1, 1);
      all.append(facts);
    }
  return all;
}

std::vector<std::string> forward(const std::string& name, const py::array& x, const py::array& v, const py::array& g,
                                 const py::array& bias, float skip_scale, int64_t recompute, const py::array& y,
                                 const py::array& norm, const py::object& maps, const py::object& signs,
                                 bool reverse) {
  return finish(entry_named(name),
                StageForwardCall{problem_of(x, v, g, bias, skip_scale, recompute), map_of(x), map_of(y),
                                 static_cast<float*>(values_of(norm).data), data_of(maps), bytes_of(signs)},
                run_on(reverse, {x, v, g, bias}, {y, norm, maps, signs}));
}

std::vector<std::string> backward(const std::string& name, const py::array& dy, const py::array& v, const py::array& g,
                                  const py::array& bias, const py::array& norm, const py::array& maps,
                                  const py::object& signs, float skip_scale, int64_t recompute, const py::array& dx,
                                  const py::object& dv, const py::object& dg, const py::object& dbias, bool reverse,
                                  int64_t segment_bytes, int64_t multiprocessors) {
  return finish(
      entry_named(name),
      StageBackwardCall{problem_of(dy, v, g, bias, skip_scale, recompute), map_of(dy), map_of(dx),
                        static_cast<const float*>(values_of(norm).data), values_of(maps).data, bytes_of(signs),
                        !dv.is_none(), values_of(dv), values_of(dg), values_of(dbias), segment_bytes, multiprocessors},
      run_on(reverse, {dy, v, g, bias, norm, maps, signs}, {dx, dv, dg, dbias}));
}

template <class T, bool kBackward>
std::vector<std::string> row_norm_of(const py::array& v, const py::array& g, const py::object& dw, const py::array& w,
                                     const py::array& dg, const py::array& norm, int64_t outer, int64_t rows,
                                     int64_t inner, bool reverse) {
  using Wide = typename RowNormParams<T>::Wide;
  const auto pointer = [](const py::array& array) { return static_cast<T*>(pointer_of(array)); };
  const int64_t shares = row_shares(rows, outer * inner);
  std::vector<Wide> partial(static_cast<std::size_t>(shares > 1 ? rows * shares : 0),
                            std::numeric_limits<Wide>::quiet_NaN());
  const RowNormParams<T> params{pointer(v),
                                pointer(g),
                                dw.is_none() ? nullptr : pointer(py::cast<py::array>(dw)),
                                pointer(w),
                                pointer(dg),
                                static_cast<Wide*>(pointer_of(norm)),
                                outer,
                                rows,
                                inner,
                                partial.empty() ? nullptr : partial.data(),
                                shares};
  Run run = kBackward ? run_on(reverse, {v, g, dw, norm}, {w, dg}) : run_on(reverse, {v, g}, {w, norm});
  run.arrays.push_back({reinterpret_cast<const char*>(partial.data()), partial.size() * sizeof(Wide), true});
  const Status status = enqueue_row_norm<T, kBackward>(params, &run);
  return findings_of(run, status);
}

// Forward without dw, backward with it. uint16 arrays are bfloat16.
std::vector<std::string> row_norm(const py::array& v, const py::array& g, const py::object& dw, const py::array& w,
                                  const py::array& dg, const py::array& norm, int64_t outer, int64_t rows,
                                  int64_t inner, bool reverse) {
  const auto call = [&](auto value) {
    using T = decltype(value);
    return dw.is_none() ? row_norm_of<T, false>(v, g, dw, w, dg, norm, outer, rows, inner, reverse)
                        : row_norm_of<T, true>(v, g, dw, w, dg, norm, outer, rows, inner, reverse);
  };
  if (v.dtype().is(py::dtype::of<double>())) return call(double{});
  if (v.dtype().is(py::dtype::of<uint16_t>())) return call(BFloat{});
  if (v.itemsize() == 2) return call(Half{});
  return call(float{});
}

}  // namespace
}  // namespace wnfused::gpu

PYBIND11_MODULE(wnfused_emulation, module) {
  module.def("entries", &wnfused::gpu::entries);
  module.def("forward", &wnfused::gpu::forward);
  module.def("backward", &wnfused::gpu::backward);
  module.def("row_norm", &wnfused::gpu::row_norm);
  wnfused::gpu::add_layer(module);
  wnfused::gpu::add_small_linear(module);
  module.def("row_shares", &wnfused::gpu::row_shares);
}

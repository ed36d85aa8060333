// numpy arrays for the emulated kernels, and what the module's files have of one another.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <initializer_list>
#include <string>
#include <vector>

#include "cuda/target.h"

namespace py = pybind11;

namespace wnfused::gpu {

// The kernels beside the vendor's product of a layer, and the linear layers of few samples.
void add_layer(py::module_& module);
void add_small_linear(py::module_& module);

// Null where there is nothing, as in a CUDA tensor.
inline void* pointer_of(const py::array& array) { return array.size() > 0 ? const_cast<void*>(array.data()) : nullptr; }

// From its first entry to its last, whatever lies between them.
inline std::size_t extent_of(const py::array& array) {
  py::ssize_t bytes = array.itemsize();
  for (py::ssize_t dim = 0; dim < array.ndim(); ++dim) bytes += (array.shape(dim) - 1) * array.strides(dim);
  return static_cast<std::size_t>(bytes);
}

// A stream on which kernels may read the arrays of `read` and write those of `written`, None left out.
inline Run run_on(bool reverse, std::initializer_list<py::object> read, std::initializer_list<py::object> written) {
  Run run;
  run.order = reverse ? emulation::WarpOrder::kReverse : emulation::WarpOrder::kForward;
  const auto add = [&](const py::object& object, bool writable) {
    if (object.is_none()) return;
    const auto array = py::cast<py::array>(object);
    if (array.size() > 0) run.arrays.push_back({static_cast<const char*>(array.data()), extent_of(array), writable});
  };
  for (const py::object& object : read) add(object, false);
  for (const py::object& object : written) add(object, true);
  return run;
}

inline std::vector<std::string> findings_of(const Run& run, Status status) {
  if (status == kTooManyBlocks) return {"a launch of more blocks than a grid has"};
  return run.findings;
}

}  // namespace wnfused::gpu

// The choice of method and instruction set for a single convolution, its maps and scratch. See conv3x3.h.
#include "conv3x3.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <string>

#include "isa.h"
#include "layer_tensor.h"
#include "parallel.h"
#include "stage_scratch.h"

namespace wnfused::cpu {
namespace {

const Conv3x3Kernels& kernels() {
#if defined(__x86_64__)
  switch (active_isa()) {
    case Isa::kAvx512:
      return avx512::conv3x3_kernels;
    case Isa::kAvx2:
      return avx2::conv3x3_kernels;
    default:
      break;
  }
#endif
  return portable::conv3x3_kernels;
}

Parameter parameter_of(const float* data) { return {const_cast<float*>(data), false, false}; }

Parameter parameter_of(const std::optional<Tensor>& tensor) {
  if (!tensor) return {};
  return {const_cast<void*>(tensor->const_data_ptr()), false, !tensor->is_contiguous()};
}

// `geometry` is that of a convolution which reads such a map.
LayerMap map_of(const std::optional<Tensor>& tensor, const Geometry& geometry) {
  if (!tensor) return {};
  const Tensor& t = *tensor;
  const ExternalMap given{const_cast<void*>(t.const_data_ptr()), false, t.stride(0), t.stride(1), t.stride(2),
                          t.stride(3)};
  const int64_t expected[] = {geometry.height * geometry.width * geometry.channels, 1,
                              geometry.width * geometry.channels, geometry.channels};
  bool in_place = geometry.channels == geometry.padded_channels;
  for (int d = 0; d < 4; ++d) in_place = in_place && (t.size(d) == 1 || t.stride(d) == expected[d]);
  return {given, in_place ? static_cast<float*>(given.data) : nullptr, in_place};
}

void lay_out_copy(Arena& arena, const Geometry& geometry, LayerMap& map) {
  if (map.is_copied()) map.own = arena.take(geometry.map_size());
}

void lay_out(Arena& arena, Conv3x3Forward& job, int64_t workers) {
  lay_out_common(arena, job.geometry, workers, worker_floats(job.geometry), job.scratch);
  lay_out_copy(arena, job.geometry, job.x);
  lay_out_copy(arena, job.transposed, job.y);
  lay_out_copy(arena, job.transposed, job.residual);
}

void lay_out(Arena& arena, Conv3x3Backward& job, int64_t workers) {
  const Geometry& geometry = job.geometry;
  // Both geometries' items run on the same scratch; an item of dz holds its pixels of y.
  const int64_t floats = std::max({worker_floats(geometry), worker_floats(job.transposed),
                                   kMapPixels * job.transposed.padded_channels});
  lay_out_common(arena, job.transposed, workers, floats, job.scratch);
  if (job.weight) {
    job.scratch.gradient[0] = arena.take(geometry.gradient_size() * geometry.wgrad_slices);
    job.scratch.bias_gradient[0] = arena.take(geometry.padded_outputs * geometry.wgrad_slices);
    lay_out_copy(arena, geometry, job.x);
  }
  lay_out_copy(arena, geometry, job.dx);
  if (!job.make_dz) job.dz.own = job.dy.own;
  else if (!job.dz.in_place) job.dz.own = arena.take(job.transposed.map_size());
}

int64_t workers_for(int64_t items) { return std::clamp<int64_t>(items, 1, worker_limit()); }

// Geometries of both ways, for maps like x.
template <class Job>
void set_geometry(Job& job, const Conv3x3Layer& layer) {
  const Tensor& x = layer.x;
  const int64_t images = x.size(0), inputs = x.size(1), outputs = layer.v.size(0), height = x.size(2), width = x.size(3);
  job.geometry = make_single_geometry(images, inputs, outputs, height, width, layer.method, worker_limit());
  job.transposed = make_single_geometry(images, outputs, inputs, height, width, layer.method, worker_limit());
}

// For tests: the method of a 3x3 layer, or "vendor".
std::string cpu_conv3x3_method(int64_t images, int64_t inputs, int64_t outputs, int64_t height, int64_t width) {
  const std::optional<Method> method = conv3x3_method(images, inputs, outputs, height, width);
  return method ? name_of(*method) : "vendor";
}

// False when it met a value that is not finite.
template <class Job>
bool run_once(Job& job, int64_t workers, void (*run)(const Job&, Worker&)) {
  Arena measure(nullptr);
  lay_out(measure, job, workers);
  const Workspace workspace(measure.used());
  Arena arena(workspace.data());
  lay_out(arena, job, workers);
  std::fill_n(job.scratch.zeros, zeros_floats(job.geometry), 0.0f);
  std::atomic<bool> poisoned{false};
  job.poisoned = &poisoned;
  run_workers(workers, [&](Worker& worker) { run(job, worker); });
  return !poisoned.load();
}

}  // namespace

std::optional<Method> conv3x3_method(int64_t images, int64_t inputs, int64_t outputs, int64_t height, int64_t width) {
  // Of the products at least a sixth must be no padding, and there must be enough of them to pack the weights for: a tile
  // saves as much as four pixels of the direct method, and narrow vectors pack more slowly.
  constexpr int64_t kPadding = 6, kPixels = 4;
  const int64_t weights_a_tile = active_isa() == Isa::kAvx512 ? 8192 : 2048;
  // Memory for copies of maps in other layouts, in floats: 1 GB.
  constexpr int64_t kCopies = int64_t{1} << 28;
  if (std::min({images, inputs, outputs, height, width}) < 1) return std::nullopt;
  const Method method = preferred_method(images, height, width);
  const Geometry geometry = make_single_geometry(images, inputs, outputs, height, width, method, worker_limit());
  const int64_t padded = geometry.padded_channels, padded_outputs = geometry.padded_outputs;
  const int64_t tiles = geometry.is_winograd() ? geometry.units : (geometry.units + kPixels - 1) / kPixels;
  const bool faster = kPadding * inputs * outputs >= padded * padded_outputs &&
                      inputs * outputs <= weights_a_tile * tiles;
  if (!faster || geometry.pixels() * 2 * (padded + padded_outputs) > kCopies) return std::nullopt;
  return method;
}

bool run_conv3x3(const Conv3x3Layer& layer, const std::optional<Tensor>& residual, const Tensor& y, float* norm) {
  Conv3x3Forward job{};
  set_geometry(job, layer);
  job.x = map_of(layer.x, job.geometry);
  job.y = map_of(y, job.transposed);
  job.residual = map_of(residual, job.transposed);
  job.v = parameter_of(layer.v);
  job.g = parameter_of(layer.gain);
  job.bias = parameter_of(layer.bias);
  job.norm = norm;
  job.activation = layer.activation;
  job.slope = layer.slope;
  return run_once(job, workers_for(job.geometry.conv_items()), kernels().forward);
}

bool run_conv3x3_backward(const Conv3x3Layer& layer, const Tensor& dy, const Tensor& y, const float* norm,
                          const Conv3x3Gradients& gradients) {
  Conv3x3Backward job{};
  set_geometry(job, layer);
  job.x = map_of(layer.x, job.geometry);
  job.dx = map_of(gradients.dx, job.geometry);
  job.dy = map_of(dy, job.transposed);
  job.y = map_of(y, job.transposed);
  job.dz = map_of(gradients.dz, job.transposed);
  job.make_dz = layer.activation != Activation::kNone || !job.dy.in_place;
  job.weight = gradients.dv.has_value();
  job.v = parameter_of(layer.v);
  job.g = parameter_of(layer.gain);
  job.dv = parameter_of(gradients.dv);
  job.dg = parameter_of(gradients.dgain);
  job.dbias = parameter_of(gradients.dbias);
  job.norm = norm;
  job.activation = layer.activation;
  job.slope = layer.slope;
  const int64_t items = job.transposed.conv_items() + (job.weight ? job.geometry.wgrad_items() : 0);
  return run_once(job, workers_for(items), kernels().backward);
}

}  // namespace wnfused::cpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CompositeExplicitAutograd, m) {
  m.impl("cpu_conv3x3_method", TORCH_BOX(&wnfused::cpu::cpu_conv3x3_method));
}

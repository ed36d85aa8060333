// What every single convolution's call does, whichever kernels it takes (conv_layer.h): tensors as the kernels see
// them, the number of workers, scratch memory, one run.
#pragma once

#include <algorithm>
#include <atomic>

#include "cpu/conv/scratch.h"
#include "cpu/conv_layer/conv_layer.h"
#include "cpu/layer/tensor.h"
#include "cpu/machine/parallel.h"

namespace wnfused::cpu {

// Waking a worker costs what so many multiply-adds do. Those of fewer outputs take as long as those of half a block.
inline int64_t workers_for(const ConvShape& shape) {
  constexpr int64_t kWorkEach = 1 << 18;
  const int64_t outputs = std::max<int64_t>(shape.outputs, kLanes / 2);
  const int64_t weights = shape.inputs * outputs / shape.groups * shape.taps();
  const int64_t work = shape.images * shape.output_size().product() * weights;
  return std::clamp<int64_t>(work / kWorkEach, 1, worker_limit());
}

inline Parameter parameter_of(const float* data) { return {const_cast<float*>(data), false, false}; }

inline Parameter parameter_of(const std::optional<torch::stable::Tensor>& tensor) {
  if (!tensor) return {};
  return {const_cast<void*>(tensor->const_data_ptr()), is_bfloat16(*tensor), !tensor->is_contiguous()};
}

inline LayerMap dense_map(const ExternalMap& given, const MapShape& shape) {
  if (shape.channels != shape.padded_channels) return {given, nullptr, Access::kCopy, true};
  return {given, static_cast<float*>(given.data), Access::kInPlace, true};
}

// The distance from one line of a map to the next, the same everywhere (with_even_lines). A map over one dim has one
// line, and levels of one row are lines.
inline int64_t line_stride(const torch::stable::Tensor& t) {
  const int64_t last = t.dim() - 1;
  if (t.dim() == 3) return t.size(last) * t.stride(last);
  return t.dim() == 5 && t.size(last - 1) == 1 ? t.stride(2) : t.stride(last - 1);
}

// Whether channels of a pixel, and then pixels, lie one after another.
inline bool is_dense(const ExternalMap& given, const MapShape& shape) {
  const auto lies = [](int64_t size, int64_t stride, int64_t expected) { return size == 1 || stride == expected; };
  return lies(shape.channels, given.channel_stride, 1) && lies(shape.width, given.column_stride, shape.channels) &&
         lies(shape.height, given.row_stride, shape.width * shape.channels) &&
         lies(shape.images, given.image_stride, shape.height * shape.width * shape.channels);
}

inline LayerMap map_of(const std::optional<torch::stable::Tensor>& tensor, const MapShape& shape, bool matrix) {
  if (!tensor) return {};
  const torch::stable::Tensor& t = *tensor;
  if (matrix) {
    const ExternalMap given{const_cast<void*>(t.const_data_ptr()), false, 0, 1, shape.map_size(), shape.channels};
    return dense_map(given, shape);
  }
  const ExternalMap given{const_cast<void*>(t.const_data_ptr()), is_bfloat16(t), t.stride(0), t.stride(1),
                          line_stride(t), t.stride(t.dim() - 1)};
  if (!given.bfloat16 && is_dense(given, shape)) return dense_map(given, shape);
  return {given, nullptr, Access::kCopy, false};
}

inline void lay_out_copy(Arena& arena, int64_t floats, LayerMap& map) {
  if (map.is_copied()) map.own = arena.take(floats);
}

// What the jobs of both directions have.
template <class Job>
void describe(const ConvLayer& layer, Job& job) {
  const ConvShape& shape = layer.shape;
  job.input = map_of_size(shape.images, shape.inputs, shape.size);
  job.output = map_of_size(shape.images, shape.outputs, shape.output_size());
  if (layer.transposed) std::swap(job.input, job.output);
  job.x = map_of(layer.x, job.input, layer.matrix);
  job.v = parameter_of(layer.v);
  job.g = parameter_of(layer.gain);
  job.bias = parameter_of(layer.bias);
  job.activation = layer.activation;
  job.slope = layer.slope;
}

// What those of the backward have besides.
template <class Job>
void describe_backward(const ConvLayer& layer, const torch::stable::Tensor& dy, const torch::stable::Tensor& y,
                       const float* norm, const ConvGradients& gradients, Job& job) {
  describe(layer, job);
  // Not 0 * dy, which is NaN where dy is infinite.
  if (job.activation == Activation::kLeakyRelu && job.slope == 0) job.activation = Activation::kRelu;
  job.dx = map_of(gradients.dx, job.input, layer.matrix);
  job.dy = map_of(dy, job.output, layer.matrix);
  job.y = map_of(y, job.output, layer.matrix);
  job.dz = map_of(gradients.dz, job.output, layer.matrix);
  job.dv = parameter_of(gradients.dv);
  job.dg = parameter_of(gradients.dgain);
  job.dbias = parameter_of(gradients.dbias);
  job.is_transposed = layer.transposed;
  job.weight = gradients.dv.has_value();
  job.norm = norm;
}

}  // namespace wnfused::cpu

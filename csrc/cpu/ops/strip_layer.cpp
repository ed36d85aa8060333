#include "cpu/ops/strip_layer.h"

#include <torch/csrc/stable/library.h>

#include "cpu/layer/formats.h"
#include "cpu/layer/gains.h"
#include "cpu/layer/passes.h"
#include "cpu/machine/isa.h"
#include "cpu/machine/parallel.h"
#include "cpu/machine/workspace.h"
#include "cpu/ops/conv_extents.h"
#include "cpu/ops/product_shares.h"
#include "cpu/strips/strips.h"

namespace wnfused::cpu {
namespace {

constexpr int64_t kMostFloats = int64_t{1} << 24;  // of a worker's memory

// A map of so many pixels, or none.
StripMap map_of(const std::optional<Tensor>& t, const Triple& size) {
  if (!t) return {nullptr, 0, 1, 0};
  float* data = const_cast<float*>(entries<float>(*t));
  const int64_t channels = t->size(1), pixels = size.product();
  if (is_channels_last(*t)) return {data, 1, channels, channels * pixels};
  return {data, pixels, 1, channels * pixels};
}

// Places of a strip: what its channels have room for in the first level of cache, but more than its taps reach beside
// them, and few enough for `parts` strips.
StripCut cut_for(const Strips& strips, const StripMap& target, int64_t parts) {
  constexpr int64_t kFloats = 1 << 13, kFew = 6;
  const int64_t targets = target.is_channels_last() && strips.targets > kFew ? kLanes : kStripTargets;
  const int64_t widest = std::max(kFloats / (strips.source_planes() + targets), strips.high - strips.low);
  const int64_t span = std::min(widest, divide_up(strips.places(), parts));
  return cut_strips(strips, round_up(span, strip_kernels()->unit), targets);
}

// A division into strips: where they read, and a worker's memory.
struct Plan {
  Plan(const Strips& given, const StripMap& target, int64_t parts)
      : strips(given),
        cut(cut_for(strips, target, parts)),
        offsets(strip_offsets(strips, cut)),
        floats(strip_floats(strips, cut)) {}

  Strips strips;
  StripCut cut;
  std::vector<int64_t> offsets;
  int64_t floats;
};

// The way from one side's maps to the other's, in strips that so many workers share.
Plan plan_for(const StripLayer& layer, bool back, const StripMap& target, int64_t workers) {
  const bool taps_first = !layer.v.is_contiguous();
  const Strips strips = back ? strips_back(layer.shape, taps_first) : strips_of(layer.shape, taps_first);
  return {strips, target, divide_up(4 * workers, layer.shape.groups)};
}

int64_t workers_for(const ConvShape& shape) {
  return product_workers(shape.images * shape.output_size().product() * shape.outputs * shape.inputs / shape.groups *
                         shape.taps());
}

// How many places there are to each pixel of y: those between its lines and images are summed in vain.
double places_each(const ConvShape& shape) {
  const Triple output = shape.output_size();
  const auto pitch = [&](int64_t Triple::*at) {
    const int64_t stride = shape.stride.*at, padding = shape.padding.*at;
    const int64_t after = shape.dilation.*at * (shape.kernel.*at - 1) - padding;
    return std::max(output.*at + std::max<int64_t>(after, 0) / stride,
                    divide_up(shape.size.*at, stride) + divide_up(padding, stride));
  };
  return static_cast<double>(pitch(&Triple::row)) * static_cast<double>(pitch(&Triple::column)) /
         static_cast<double>(output.product());
}

// For the tests: whether a layer goes this way; of a transposed one, the convolution whose data gradient it is. Triples
// are of levels, rows and columns.
bool cpu_conv_strips(const std::vector<int64_t>& maps, const std::vector<int64_t>& kernel,
                     const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                     const std::vector<int64_t>& dilation, int64_t groups, bool last) {
  const ConvShape shape{maps.at(0),
                        maps.at(1),
                        maps.at(2),
                        triple_of(maps, 3, 1),
                        triple_of(kernel, 0, 1),
                        triple_of(stride, 0, 1),
                        triple_of(padding, 0, 0),
                        triple_of(dilation, 0, 1),
                        groups};
  return suits_strips(shape, last);
}

}  // namespace

const StripKernels* strip_kernels() {
#if defined(__x86_64__)
  if (active_isa() == Isa::kAvx512) return &avx512::strip_kernels;
  if (active_isa() == Isa::kAvx2) return &avx2::strip_kernels;
#endif
  return nullptr;
}

// Measured (bench/NOTES.md): more channels than these fill the lanes of the other kernels, depthwise layers have some of
// their own, and with large steps most of the time goes into copies of single pixels.
bool suits_strips(const ConvShape& shape, bool last) {
  constexpr int64_t kFewChannels = 6, kGroup = 24, kStridedGroup = 15, kStride = 16, kStridedTaps = 64, kTurned = 16;
  const bool any = shape.images > 0 && shape.inputs > 0 && shape.outputs > 0 && shape.outputs % shape.groups == 0;
  if (!strip_kernels() || !any || !shape.is_sound() || !shape.has_one_level() || shape.is_depthwise()) return false;
  const int64_t inputs = shape.inputs / shape.groups, outputs = shape.outputs / shape.groups;
  constexpr double kPlaces = 3, kPlacesOfFew = 16;
  if (places_each(shape) > (outputs <= kFewChannels ? kPlacesOfFew : kPlaces)) return false;
  const int64_t stride = shape.stride.product();
  if (stride > 1 && (stride > kStride || shape.taps() > kStridedTaps)) return false;
  if (last) {
    const bool first = inputs <= kFewChannels && outputs <= kTurned;
    return shape.groups == 1 && stride == 1 && (first || (outputs <= kFewChannels && shape.taps() > 1));
  }
  if (shape.groups == 1) return std::min(inputs, outputs) <= kFewChannels;
  return stride > 1 ? inputs <= kStridedGroup : std::max(inputs, outputs) <= kGroup;
}

Tensor for_strips(const Tensor& map) {
  return map.is_contiguous() || is_channels_last(map) ? map : torch::stable::contiguous(map);
}

bool run_strips(const StripLayer& layer, const std::optional<Tensor>& residual, const Tensor& y, float* norms) {
  const ConvShape& shape = layer.shape;
  const int64_t workers = workers_for(shape);
  const Triple input = shape.size, output = shape.output_size();
  const StripMap source = map_of(layer.x, layer.transposed ? output : input);
  const StripMap target = map_of(y, layer.transposed ? input : output);
  const Plan plan = plan_for(layer, layer.transposed, target, workers);
  if (plan.floats > kMostFloats) return false;
  row_norms(layer.v, norms, 0, shape.outputs);
  const std::vector<float> scale = scales_of(layer.gain, norms, shape.outputs);
  const Workspace memory(workers * plan.floats);
  const StripSums job{&plan.strips,
                      plan.cut,
                      plan.offsets.data(),
                      layer.transposed,
                      entries<float>(layer.v),
                      scale.data(),
                      source,
                      target,
                      layer.bias,
                      residual ? entries<float>(*residual) : nullptr,
                      layer.activation,
                      layer.slope,
                      memory.data(),
                      plan.floats};
  std::atomic<bool> finite{true};
  run_workers(workers, [&](Worker& worker) { strip_kernels()->forward(job, worker, finite); });
  return finite;
}

bool run_strips_backward(const StripLayer& layer, const Tensor& dy, const Tensor& y, const float* norms,
                         const ConvGradients& gradients) {
  const ConvShape& shape = layer.shape;
  const bool need_v = gradients.dv.has_value(), masked = layer.activation != Activation::kNone;
  const int64_t workers = workers_for(shape);
  // x and dx; dz, which lies as dy does.
  const Triple size = layer.transposed ? shape.output_size() : shape.size;
  const Triple other = layer.transposed ? shape.size : shape.output_size();
  const StripMap x = map_of(layer.x, size), dx = map_of(gradients.dx, size);
  StripMap gradient = map_of(dy, other);
  const Plan input = plan_for(layer, !layer.transposed, dx, workers);
  // Slices that the threads share, whatever their number.
  constexpr int64_t kSlices = 8, kSliceFloats = int64_t{1} << 20;
  Plan weight(strips_of(shape, !layer.v.is_contiguous()), layer.transposed ? x : gradient,
              divide_up(kSlices, shape.groups));
  const int64_t depth = round_up(static_cast<int64_t>(weight.offsets.size()), kGradientTaps);
  const int64_t rows = shape.outputs * depth, most = std::min(weight.cut.count, divide_up(2 * kSlices, shape.groups));
  const int64_t slices = std::clamp(kSliceFloats / rows, int64_t{1}, most);
  weight.offsets.resize(depth, 0);
  const int64_t floats = std::max(gradients.dx ? input.floats : 0, need_v ? weight.floats : 0);
  if (floats > kMostFloats) return false;

  std::optional<Tensor> dz = gradients.dz;
  if (masked && !dz) dz = empty_as(dy);
  if (masked || gradients.dbias) {
    const Values nothing{nullptr, false};
    run_mask(lines_of(dy),
             {values_of(dy), values_of(y), masked ? values_of(*dz) : nothing, nothing, nullptr, nullptr, layer.activation,
              layer.slope},
             gradients.dbias);
  }
  if (masked) gradient.data = static_cast<float*>(dz->mutable_data_ptr());
  const float* v = entries<float>(layer.v);
  const std::vector<float> scale = scales_of(layer.gain, norms, shape.outputs);
  const int64_t dw = need_v ? round_up(slices * rows, kLanes) : 0;
  const Workspace memory(dw + workers * floats);
  const StripSums sums{&input.strips,
                       input.cut,
                       input.offsets.data(),
                       !layer.transposed,
                       v,
                       scale.data(),
                       gradient,
                       dx,
                       nullptr,
                       nullptr,
                       Activation::kNone,
                       0.0f,
                       memory.data() + dw,
                       floats};
  const StripGradient weights{&weight.strips,
                              weight.cut,
                              weight.offsets.data(),
                              layer.transposed ? gradient : x,
                              layer.transposed ? x : gradient,
                              v,
                              layer.gain,
                              norms,
                              gradients.dv ? static_cast<float*>(gradients.dv->mutable_data_ptr()) : nullptr,
                              gradients.dgain,
                              slices,
                              depth,
                              memory.data()};
  std::atomic<bool> finite{true};
  run_workers(workers, [&](Worker& worker) { strip_kernels()->backward(sums, weights, worker, finite); });
  return finite;
}

}  // namespace wnfused::cpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CompositeExplicitAutograd, m) {
  m.impl("cpu_conv_strips", TORCH_BOX(&wnfused::cpu::cpu_conv_strips));
}

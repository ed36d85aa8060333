#include "cpu/ops/strip_layer.h"

#include "cpu/layer/formats.h"
#include "cpu/layer/gains.h"
#include "cpu/layer/passes.h"
#include "cpu/machine/parallel.h"
#include "cpu/machine/workspace.h"
#include "cpu/ops/conv_extents.h"
#include "cpu/ops/product_shares.h"
#include "cpu/strips/strips.h"

namespace wnfused::cpu {
namespace {

// The layout of a map of so many pixels; without one, any.
StripLayout layout_of(const std::optional<Tensor>& map, const Triple& size) {
  if (!map) return {0, 1, 0};
  const int64_t channels = map->size(1), pixels = size.product();
  return is_channels_last(*map) ? StripLayout{1, channels, channels * pixels}
                                : StripLayout{pixels, 1, channels * pixels};
}

// Places of a strip: what its channels have room for in the first level of cache, or as many as its taps reach beside
// them; few enough for `parts` strips, but for those that would copy many times what they sum.
StripCut cut_for(const StripKernels& kernels, const Strips& strips, const StripLayout& target, int64_t parts) {
  constexpr int64_t kFloats = 1 << 13, kCopies = 8;
  const int64_t targets = target.has_pixels_apart() && strips.targets > kFewTurned ? kLanes : kStripTargets;
  const int64_t reach = strips.high - strips.low;
  const int64_t widest = std::max({kFloats / (strips.source_planes() + targets), reach, kernels.unit});
  const int64_t shared = std::max(divide_up(strips.places(), parts), reach / kCopies);
  return cut_strips(strips, round_up(std::min(widest, shared), kernels.unit), targets);
}

// Every plan is made without its offsets, which only those that go its way need.
StripPlan plan_for(const StripKernels& kernels, const Strips& strips, const StripLayout& target, int64_t parts) {
  const StripCut cut = cut_for(kernels, strips, target, parts);
  return {strips, cut, strip_room(strips, cut), {}};
}

// The way from one side's maps to the other's, in strips that so many workers share.
StripPlan sums_plan(const StripKernels& kernels, const StripLayer& layer, bool back, const StripLayout& target,
                    int64_t workers) {
  const bool taps_first = !layer.v.is_contiguous();
  const Strips strips = back ? strips_back(layer.shape, taps_first) : strips_of(layer.shape, taps_first);
  return plan_for(kernels, strips, target, divide_up(4 * workers, layer.shape.groups));
}

// That of dw, whose strips the threads share in slices, whatever their number.
constexpr int64_t kSlices = 8;

StripPlan gradient_plan(const StripKernels& kernels, const StripLayer& layer, const StripLayout& dz) {
  const Strips strips = strips_of(layer.shape, !layer.v.is_contiguous());
  return plan_for(kernels, strips, dz, divide_up(kSlices, layer.shape.groups));
}

// How large dw is in all slices: a few megabytes at most.
struct WeightSums {
  int64_t slices, depth;

  explicit WeightSums(const StripPlan& plan) {
    constexpr int64_t kFloats = int64_t{1} << 20;
    const Strips& strips = plan.strips;
    depth = round_up(strips.sources * strips.channel_taps, kGradientTaps);
    const int64_t most = std::min(plan.cut.count, divide_up(2 * kSlices, strips.groups));
    slices = std::clamp(kFloats / (strips.groups * strips.targets * depth), int64_t{1}, most);
  }
};

// What taps reach of a map may be all of it: up to so many floats of memory for a worker, and for all together.
constexpr int64_t kMostOfOne = int64_t{1} << 24, kMostOfAll = int64_t{1} << 26;

int64_t workers_within(int64_t workers, int64_t floats_each) {
  return std::clamp(kMostOfAll / std::max<int64_t>(floats_each, 1), int64_t{1}, workers);
}

int64_t workers_for(const ConvShape& shape) {
  return product_workers(shape.images * shape.output_size().product() * shape.outputs * shape.inputs / shape.groups *
                         shape.taps());
}

}  // namespace

bool run_strips(const StripLayer& layer, const std::optional<Tensor>& residual, const Tensor& y, float* norms) {
  const ConvShape& shape = layer.shape;
  int64_t workers = workers_for(shape);
  const Triple input = shape.size, output = shape.output_size();
  const StripLayout source = layout_of(layer.x, layer.transposed ? output : input);
  const StripLayout target = layout_of(y, layer.transposed ? input : output);
  const StripKernels* kernels = strip_kernels();
  StripPlan plan = sums_plan(*kernels, layer, layer.transposed, target, workers);
  if (plan.room.size > kMostOfOne) return false;
  workers = workers_within(workers, plan.room.size);
  plan.offsets = strip_offsets(plan.strips, plan.cut);
  if (layer.gain) row_norms(layer.v, norms, 0, shape.outputs);
  const std::vector<float> scale = scales_of(layer.gain, norms, shape.outputs);
  const Workspace memory(workers * plan.room.size);

  StripSums job{};
  job.plan = &plan;
  job.back = layer.transposed;
  job.v = entries<float>(layer.v);
  job.scale = scale.data();
  job.source = {source, entries<float>(layer.x)};
  job.target = {target, static_cast<float*>(y.mutable_data_ptr())};
  job.bias = layer.bias;
  job.residual = residual ? entries<float>(*residual) : nullptr;
  job.activation = layer.activation;
  job.slope = layer.slope;
  std::atomic<bool> finite{true};
  run_workers(workers, [&](Worker& worker) { kernels->forward(job, {memory.data(), plan.room.size}, worker, finite); });
  return finite;
}

bool run_strips_backward(const StripLayer& layer, const Tensor& dy, const Tensor& y, const float* norms,
                         const ConvGradients& gradients) {
  const ConvShape& shape = layer.shape;
  int64_t workers = workers_for(shape);
  // x and dx; dz, which lies as dy does.
  const Triple size = layer.transposed ? shape.output_size() : shape.size;
  const StripLayout x = layout_of(layer.x, size), dx = layout_of(gradients.dx, size);
  const StripLayout dz = layout_of(dy, layer.transposed ? shape.size : shape.output_size());
  const StripKernels* kernels = strip_kernels();
  StripPlan input = sums_plan(*kernels, layer, !layer.transposed, dx, workers);
  StripPlan weight = gradient_plan(*kernels, layer, layer.transposed ? x : dz);
  const WeightSums weight_sums(weight);
  const int64_t each = std::max(gradients.dx ? input.room.size : 0, gradients.dv ? weight.room.size : 0);
  if (each > kMostOfOne) return false;
  workers = workers_within(workers, each);
  if (gradients.dx) input.offsets = strip_offsets(input.strips, input.cut);
  if (gradients.dv) {
    weight.offsets = strip_offsets(weight.strips, weight.cut);
    weight.offsets.resize(weight_sums.depth, 0);
  }

  const Tensor gradient = masked_gradient(dy, y, gradients.dz, layer.activation, layer.slope, gradients.dbias);
  const StripSource z{dz, entries<float>(gradient)}, map{x, entries<float>(layer.x)};
  const float* v = entries<float>(layer.v);
  const std::vector<float> scale = scales_of(layer.gain, norms, shape.outputs);
  const int64_t dw = gradients.dv ? round_up(weight_sums.slices * weight_sums.depth * shape.outputs, kLanes) : 0;
  const Workspace memory(dw + workers * each);

  StripSums sums{};
  sums.plan = &input;
  sums.back = !layer.transposed;
  sums.v = v;
  sums.scale = scale.data();
  sums.source = z;
  sums.target = {dx, gradients.dx ? static_cast<float*>(gradients.dx->mutable_data_ptr()) : nullptr};
  StripGradient products{};
  products.plan = &weight;
  products.x = layer.transposed ? z : map;
  products.dz = layer.transposed ? map : z;
  products.v = v;
  products.gain = layer.gain;
  products.norm = norms;
  products.dv = gradients.dv ? static_cast<float*>(gradients.dv->mutable_data_ptr()) : nullptr;
  products.dgain = gradients.dgain;
  products.slices = weight_sums.slices;
  products.depth = weight_sums.depth;
  products.dw = memory.data();
  std::atomic<bool> finite{true};
  run_workers(workers, [&](Worker& worker) {
    kernels->backward(sums, products, {memory.data() + dw, each}, worker, finite);
  });
  return finite;
}

}  // namespace wnfused::cpu

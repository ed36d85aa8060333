// A convolution of maps in NCHW with few channels on a side, pixels for lanes (strips.h).
#include "cpu/strips/strips.h"

#include <torch/csrc/stable/library.h>

#include "cpu/layer/checks.h"
#include "cpu/layer/formats.h"
#include "cpu/layer/gains.h"
#include "cpu/layer/passes.h"
#include "cpu/machine/isa.h"
#include "cpu/machine/parallel.h"
#include "cpu/machine/workspace.h"
#include "cpu/ops/conv_gradients.h"
#include "cpu/ops/conv_routes.h"
#include "cpu/ops/product_shares.h"

namespace wnfused::cpu {
namespace {

int64_t products_of(const ConvShape& shape) {
  return shape.images * shape.output_size().product() * shape.outputs * shape.inputs / shape.groups * shape.taps();
}

// Measured (bench/NOTES.md): more channels than these fill the lanes of the other kernels, depthwise layers have some of
// their own, and with large steps most of the time goes into copies of single pixels.
bool suits_strips(const ConvShape& shape) {
  constexpr int64_t kFewChannels = 6, kGroup = 24, kStridedGroup = 15, kStride = 16, kStridedTaps = 64;
  const int64_t inputs = shape.inputs / shape.groups, outputs = shape.outputs / shape.groups;
  const int64_t stride = shape.stride.product();
  if (stride > 1 && (stride > kStride || shape.taps() > kStridedTaps)) return false;
  if (shape.is_depthwise() || shape.images == 0) return false;
  if (shape.groups == 1) return std::min(inputs, outputs) <= kFewChannels;
  return std::max(inputs, stride > 1 ? 0 : outputs) <= (stride > 1 ? kStridedGroup : kGroup);
}

bool is_one_level(const ConvShape& shape) {
  return shape.is_sound() && shape.has_one_level() && shape.inputs > 0 && shape.outputs > 0 &&
         shape.outputs % shape.groups == 0;
}

// A layer that may go this way.
std::optional<ConvShape> open_shape(const ConvCall& conv) {
  const std::optional<ConvShape> shape = conv_shape(conv.x, conv.v, conv.at);
  if (!shape || !conv.gain || !strip_kernels() || gives_channels_last(conv)) return std::nullopt;
  const bool floats = conv.x.scalar_type() == ScalarType::Float && conv.v.scalar_type() == ScalarType::Float;
  return floats && conv.v.is_contiguous() && is_one_level(*shape) ? shape : std::nullopt;
}

// Places of a strip: what its channels have room for in the first level of cache, but more than its taps reach beside
// them, and few enough for `parts` strips.
StripCut cut_for(const Strips& strips, int64_t parts) {
  constexpr int64_t kFloats = 1 << 13;
  const int64_t widest = std::max(kFloats / (strips.source_planes() + kStripTargets), strips.high - strips.low);
  const int64_t span = std::min(widest, divide_up(strips.places(), parts));
  return cut_strips(strips, round_up(span, strip_kernels()->unit));
}

// A division into strips: where it reads, and its memory.
struct Plan {
  Plan(const Strips& given, int64_t parts)
      : strips(given), cut(cut_for(strips, parts)), offsets(strip_offsets(strips, cut)), floats(strip_floats(strips, cut)) {}

  Strips strips;
  StripCut cut;
  std::vector<int64_t> offsets;
  int64_t floats;  // of a worker's memory
};

constexpr int64_t kMostFloats = int64_t{1} << 24;  // of a worker's memory

// Sums that as many workers share.
int64_t sum_parts(const ConvShape& shape, int64_t workers) { return divide_up(4 * workers, shape.groups); }

// For the tests: whether a layer in NCHW goes this way. Triples are of levels, rows and columns.
bool cpu_conv_strips(const std::vector<int64_t>& maps, const std::vector<int64_t>& kernel,
                     const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                     const std::vector<int64_t>& dilation, int64_t groups) {
  const ConvShape shape{maps.at(0),
                        maps.at(1),
                        maps.at(2),
                        triple_of(maps, 3, 1),
                        triple_of(kernel, 0, 1),
                        triple_of(stride, 0, 1),
                        triple_of(padding, 0, 0),
                        triple_of(dilation, 0, 1),
                        groups};
  return strip_kernels() && is_one_level(shape) && suits_strips(shape);
}

Tensor in_planes(const Tensor& map) { return map.is_contiguous() ? map : torch::stable::contiguous(map); }

}  // namespace

const StripKernels* strip_kernels() {
#if defined(__x86_64__)
  if (active_isa() == Isa::kAvx512) return &avx512::strip_kernels;
  if (active_isa() == Isa::kAvx2) return &avx2::strip_kernels;
#endif
  return nullptr;
}

bool strips_outdo_banks(const ConvCall& conv) {
  const std::optional<ConvShape> shape = open_shape(conv);
  return shape && suits_strips(*shape);
}

std::optional<Tensor> strips_conv(const ConvCall& conv, const std::optional<Tensor>& residual, float* norms) {
  const std::optional<ConvShape> shape = open_shape(conv);
  if (!shape || !suits_strips(*shape)) return std::nullopt;
  const Tensor x = in_planes(conv.x);
  const Tensor y = empty_map(map_sizes(shape->images, shape->outputs, shape->output_size(), conv.v.dim()), false,
                             ScalarType::Float);
  check_residual(residual, y);
  const std::optional<Tensor> added = residual ? std::optional(in_planes(*residual)) : std::nullopt;
  row_norms(conv.v, norms, 0, shape->outputs);
  const std::vector<float> scale = scales_of(conv.gain, norms, shape->outputs);
  const int64_t workers = product_workers(products_of(*shape));
  const Plan plan(strips_of(*shape), sum_parts(*shape, workers));
  if (plan.floats > kMostFloats) return std::nullopt;
  const Workspace memory(workers * plan.floats);
  const StripSums job{&plan.strips,
                      plan.cut,
                      plan.offsets.data(),
                      false,
                      entries<float>(conv.v),
                      scale.data(),
                      entries<float>(x),
                      static_cast<float*>(y.mutable_data_ptr()),
                      conv.bias,
                      added ? entries<float>(*added) : nullptr,
                      conv.activation,
                      conv.slope,
                      memory.data(),
                      plan.floats};
  std::atomic<bool> finite{true};
  run_workers(workers, [&](Worker& worker) { strip_kernels()->forward(job, worker, finite); });
  return finite ? std::optional(y) : std::nullopt;
}

std::optional<LayerGradients> strips_conv_backward(const ConvCall& conv, const Tensor& dy_given, const Tensor& y_given,
                                                   const float* norms, const ConvNeeds& needs, float* dgain) {
  const std::optional<ConvShape> shape = needs.x || needs.v ? open_shape(conv) : std::nullopt;
  if (!shape || !suits_strips(*shape)) return std::nullopt;
  const int64_t workers = product_workers(products_of(*shape));
  const Plan back(strips_back(*shape), sum_parts(*shape, workers));
  // Slices that the threads share, whatever their number.
  constexpr int64_t kSlices = 8, kSliceFloats = int64_t{1} << 20;
  Plan layer(strips_of(*shape), divide_up(kSlices, shape->groups));
  const int64_t depth = round_up(static_cast<int64_t>(layer.offsets.size()), kGradientTaps);
  const int64_t weights = shape->outputs * depth, most = std::min(layer.cut.count, divide_up(2 * kSlices, shape->groups));
  const int64_t slices = std::clamp(kSliceFloats / weights, int64_t{1}, most);
  layer.offsets.resize(depth, 0);
  const int64_t floats = std::max(needs.x ? back.floats : 0, needs.v ? layer.floats : 0);
  if (floats > kMostFloats) return std::nullopt;

  const bool masked = conv.activation != Activation::kNone;
  const Tensor dy = in_planes(dy_given), signs = masked ? in_planes(y_given) : dy, x = in_planes(conv.x);
  LayerGradients made = empty_gradients(conv, conv.v, dy, needs);
  std::optional<Tensor> dz;
  if (masked) dz = made.dz ? *made.dz : empty_as(dy);
  if (masked || needs.bias) {
    const Values nothing{nullptr, false};
    run_mask(lines_of(dy),
             {values_of(dy), values_of(signs), dz ? values_of(*dz) : nothing, nothing, nullptr, nullptr, conv.activation,
              conv.slope},
             needs.bias ? static_cast<float*>(made.dbias->mutable_data_ptr()) : nullptr);
  }
  const float *gradients = entries<float>(dz ? *dz : dy), *v = entries<float>(conv.v);
  const std::vector<float> scale = scales_of(conv.gain, norms, shape->outputs);
  const int64_t dw = needs.v ? round_up(slices * weights, kLanes) : 0;
  const Workspace memory(dw + workers * floats);
  const StripSums sums{&back.strips,
                       back.cut,
                       back.offsets.data(),
                       true,
                       v,
                       scale.data(),
                       gradients,
                       made.dx ? static_cast<float*>(made.dx->mutable_data_ptr()) : nullptr,
                       nullptr,
                       nullptr,
                       Activation::kNone,
                       0.0f,
                       memory.data() + dw,
                       floats};
  const StripGradient gradient{&layer.strips, layer.cut, layer.offsets.data(), entries<float>(x), gradients, v, conv.gain,
                               norms, made.dv ? static_cast<float*>(made.dv->mutable_data_ptr()) : nullptr, dgain,
                               slices, depth, memory.data()};
  std::atomic<bool> finite{true};
  run_workers(workers, [&](Worker& worker) { strip_kernels()->backward(sums, gradient, worker, finite); });
  return finite ? std::optional(made) : std::nullopt;
}

}  // namespace wnfused::cpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CompositeExplicitAutograd, m) {
  m.impl("cpu_conv_strips", TORCH_BOX(&wnfused::cpu::cpu_conv_strips));
}

// A 1x1 convolution of maps in NCHW as products of v and their planes (planes.h).
#include "cpu/layer/checks.h"
#include "cpu/layer/formats.h"
#include "cpu/layer/gains.h"
#include "cpu/layer/passes.h"
#include "cpu/machine/parallel.h"
#include "cpu/machine/workspace.h"
#include "cpu/ops/conv_gradients.h"
#include "cpu/ops/conv_routes.h"
#include "cpu/ops/product_shares.h"
#include "cpu/planes/planes.h"

namespace wnfused::cpu {
namespace {

int64_t products_of(const PlanesShape& shape) {
  return shape.images * shape.pixels * shape.inputs * shape.outputs;
}

bool has_stride(const Sliding& at) {
  return std::any_of(at.stride.begin(), at.stride.end(), [](int64_t stride) { return stride > 1; });
}

// The pixels of a map that a stride meets.
Tensor met_pixels(const Tensor& map, const Extents& stride) {
  std::vector<int64_t> sizes = sizes_of(map), strides(map.strides().begin(), map.strides().end());
  for (size_t d = 0; d < stride.size(); ++d) {
    sizes[d + 2] = divide_up(sizes[d + 2], stride[d]);
    strides[d + 2] *= stride[d];
  }
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      map.get(), static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), 0, &made));
  return Tensor(made);
}

// The layer without its stride, `x` being the pixels that it meets.
template <class Run>
auto without_stride(const ConvCall& conv, const Tensor& x, const Run& run) {
  const Extents ones(conv.at.stride.size(), 1);
  const Sliding dense{ones, conv.at.padding, conv.at.dilation, 1};
  return run(
      ConvCall{conv_shape(x, conv.v, dense), x, conv.v, conv.gain, conv.bias, dense, conv.activation, conv.slope});
}

PlanesShape planes_of(const ConvShape& shape) {
  return {shape.images, shape.inputs, shape.outputs, shape.output_size().product()};
}

ProductShape product_shape(const PlanesShape& shape, int64_t rows, int64_t depth) {
  constexpr int64_t kCopied = 4, kPackedFloats = int64_t{1} << 21;
  return {shape.blocks(), lane_blocks_in(kPackedFloats, depth), rows, kNarrowRows, kCopied};
}

}  // namespace

Tensor planes_conv(const ConvCall& conv, const std::optional<Tensor>& residual, float* norms) {
  if (has_stride(conv.at))
    return without_stride(conv, as_contiguous(met_pixels(conv.x, conv.at.stride)),
                          [&](const ConvCall& dense) { return planes_conv(dense, residual, norms); });
  const PlanesShape shape = planes_of(conv.shape);
  const Tensor maps = as_contiguous(conv.x), y = empty_output(conv, ScalarType::Float);
  check_residual(residual, y);
  const std::optional<Tensor> added = residual ? std::optional(as_contiguous(*residual)) : std::nullopt;
  const int64_t workers = product_workers(products_of(shape));
  const ProductShares shares = share_products(product_shape(shape, shape.outputs, shape.inputs), workers);
  const int64_t packed = WideShape(shares.groups.largest() * kLanes, shape.inputs, {1}).size() + kApart;
  const int64_t own = kNarrowRows * (kDepthChunk + row_stride(kWideBlocks)) + kApart;
  const Workspace memory(workers * (packed + own));
  const PlanesForward job{shape,
                          entries<float>(maps),
                          entries<float>(conv.v),
                          added ? entries<float>(*added) : nullptr,
                          static_cast<float*>(y.mutable_data_ptr()),
                          conv.gain,
                          conv.bias,
                          norms,
                          conv.activation,
                          conv.slope,
                          shares.groups,
                          shares.row_blocks,
                          {memory.data(), memory.data() + workers * packed, packed, own}};
  run_workers(workers, [&](Worker& worker) { planes_kernels()->forward(job, worker); });
  return y;
}

LayerGradients planes_conv_backward(const ConvCall& conv, const Tensor& dy_given, const Tensor& y_given,
                                    const float* norms, const Needs& needs, float* dgain) {
  if (has_stride(conv.at)) {
    LayerGradients made = without_stride(
        conv, as_contiguous(met_pixels(conv.x, conv.at.stride)),
        [&](const ConvCall& dense) { return planes_conv_backward(dense, dy_given, y_given, norms, needs, dgain); });
    if (made.dx) {
      Tensor dx = empty_map(sizes_of(conv.x), false, ScalarType::Float), target = met_pixels(dx, conv.at.stride);
      torch::stable::zero_(dx);
      torch::stable::copy_(target, *made.dx);
      made.dx = dx;
    }
    return made;
  }
  const PlanesShape shape = planes_of(conv.shape);
  const bool masked = conv.activation != Activation::kNone;
  const Tensor dy = as_contiguous(dy_given), signs = masked ? as_contiguous(y_given) : dy, x = as_contiguous(conv.x);
  LayerGradients made = empty_gradients(conv, conv.v, dy, needs);
  const Tensor dz =
      masked_gradient(dy, signs, made.dz, conv.activation, conv.slope, to_fill(made, dgain).dbias);

  const int64_t workers = product_workers(products_of(shape));
  const PixelDepth depth(shape);
  const int64_t channels = divide_up(shape.inputs, kLanes);
  const ProductShares shares = share_products(product_shape(shape, shape.inputs, shape.outputs), workers);
  const Cut row_blocks = cut(shape.outputs, kNarrowRows / kLanes, workers);
  const Cut columns = cut_blocks(channels, kWideBlocks, divide_up(workers, row_blocks.parts));
  const int64_t packed = needs.x ? WideShape(shares.groups.largest() * kLanes, shape.outputs, {1}).size() + kApart : 0;
  const int64_t own = kNarrowRows * (kDepthChunk + row_stride(kWideBlocks)) + kApart;
  const int64_t copies = needs.v ? depth.chunks * channels * depth.units() * kLanes : 0;
  const int64_t weights = needs.v ? row_blocks.count * kLanes * row_stride(channels) : 0;
  const Workspace memory(copies + weights + workers * (packed + own));
  float* scratch = memory.data() + copies + weights;
  const std::vector<float> scale = scales_of(conv.gain, norms, shape.outputs);
  const PlanesBackward job{shape,
                           entries<float>(x),
                           entries<float>(conv.v),
                           entries<float>(dz),
                           made.dx ? static_cast<float*>(made.dx->mutable_data_ptr()) : nullptr,
                           made.dv ? static_cast<float*>(made.dv->mutable_data_ptr()) : nullptr,
                           conv.gain,
                           norms,
                           scale.data(),
                           dgain,
                           shares.groups,
                           shares.row_blocks,
                           row_blocks,
                           columns,
                           {scratch, scratch + workers * packed, packed, own},
                           memory.data(),
                           memory.data() + copies};
  run_workers(workers, [&](Worker& worker) { planes_kernels()->backward(job, worker); });
  return made;
}

}  // namespace wnfused::cpu

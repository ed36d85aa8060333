// When a 1x1 layer of maps in NCHW is products of planes.
#include "cpu/choice/rules.h"
#include "cpu/planes/planes.h"

namespace wnfused::cpu {
namespace {

bool has_planes(const ConvTraits& layer) {
  constexpr int64_t kStrided = int64_t{1} << 23;  // products that are worth a copy of the pixels that a stride meets
  const ConvShape& shape = layer.shape;
  if (!planes_kernels() || layer.transposed || layer.plain || layer.last || layer.bfloat16) return false;
  if (shape.groups > 1 || shape.taps() > 1 || !(shape.padding == Triple{0, 0, 0})) return false;
  // As are few pixels for which no kernel of conv_layer/ packs v.
  return shape.stride.product() == 1 || layer.products() >= kStrided || !float_method(shape, false);
}

// Few channels the kernels of conv_layer/ read and sum faster.
bool fills_planes(const ConvShape& shape) {
  constexpr int64_t kLeastChannels = 16;
  return std::min(shape.inputs, shape.outputs) >= kLeastChannels && shape.output_size().product() >= kLeastPlane;
}

}  // namespace

bool suits_planes(const ConvTraits& layer) { return has_planes(layer) && fills_planes(layer.shape); }

bool suits_planes_backward(const ConvTraits& layer) {
  constexpr int64_t kLeastWeights = 1024, kCopied = int64_t{1} << 29;  // floats of x
  const ConvShape& shape = layer.shape;
  if (!has_planes(layer) || !fills_planes(shape) || shape.inputs * shape.outputs < kLeastWeights) return false;
  return shape.output_pixels() <= kCopied / shape.inputs;
}

bool planes_outdo_banks(const ConvTraits& layer) {
  constexpr int64_t kMany = 64;  // pixels that are worth packing v for
  return suits_planes(layer) && layer.shape.output_pixels() > kMany;
}

}  // namespace wnfused::cpu

// When a 1x1 layer of maps in NCHW is products of planes.
#include "cpu/choice/rules.h"
#include "cpu/machine/isa.h"
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

bool has_large_planes(const ConvShape& shape) { return shape.output_size().product() >= kLeastPlane; }

bool has_many_channels(const ConvShape& shape) {
  constexpr int64_t kLeastChannels = 16;
  return std::min(shape.inputs, shape.outputs) >= kLeastChannels;
}

// So few that strips are faster, but for as many as a tile of planes has rows.
bool has_few_outputs(const ConvShape& shape) {
  constexpr int64_t kRows = 4;  // by AVX2
  return shape.outputs <= kFewChannels && shape.outputs != kRows;
}

}  // namespace

// Few channels the kernels of conv_layer/ read and sum faster by AVX-512; by AVX2 most of their blocks would be empty.
bool suits_planes(const ConvTraits& layer) {
  const ConvShape& shape = layer.shape;
  const bool suits = active_isa() == Isa::kAvx2 ? !has_few_outputs(shape) : has_many_channels(shape);
  return suits && has_planes(layer) && has_large_planes(shape);
}

bool suits_planes_backward(const ConvTraits& layer) {
  constexpr int64_t kLeastWeights = 1024, kCopied = int64_t{1} << 29;  // floats of x
  const ConvShape& shape = layer.shape;
  if (!has_planes(layer) || !has_large_planes(shape) || !has_many_channels(shape)) return false;
  return shape.inputs * shape.outputs >= kLeastWeights && shape.output_pixels() <= kCopied / shape.inputs;
}

bool planes_outdo_banks(const ConvTraits& layer) {
  return suits_planes(layer) && layer.shape.output_pixels() > kWorthPacking;
}

}  // namespace wnfused::cpu

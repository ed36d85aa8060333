// When a layer of few channels goes by strips.
#include "cpu/choice/rules.h"
#include "cpu/machine/isa.h"
#include "cpu/planes/planes.h"
#include "cpu/strips/strips.h"

namespace wnfused::cpu {
namespace {

// More channels than these fill the lanes of other kernels: of layers over one dim those of Winograd's method along
// lines, which need more than half of a vector to be worth its transforms. Of 1x1 layers by AVX2 only whole blocks do;
// forward most of the others are products of planes.
bool has_few_channels(const ConvTraits& layer) {
  constexpr int64_t kGroup = 24, kStridedGroup = 15, kOfLines = 8, kOfWideLines = 12, kOfPlanes = 15;
  const ConvShape& shape = layer.shape;
  const int64_t inputs = shape.inputs / shape.groups, outputs = shape.outputs / shape.groups;
  if (shape.groups > 1)
    return shape.stride.product() > 1 ? inputs <= kStridedGroup : std::max(inputs, outputs) <= kGroup;
  const bool planes = shape.is_pointwise() && !layer.transposed && shape.size.product() >= kLeastPlane;
  if (planes && active_isa() == Isa::kAvx2) return std::min(inputs, outputs) <= kOfPlanes;
  const int64_t of_lines = active_isa() == Isa::kAvx512 ? kOfWideLines : kOfLines;
  return std::min(inputs, outputs) <= (shape.size.row == 1 ? of_lines : kFewChannels);
}

// Channels of y up to which it is as fast to turn as to sum them. Of more, of first layers alone, the vendor's gradient
// of x takes so long that both are faster by strips.
constexpr int64_t kTurned = 16, kTurnedBackward = 256;

bool has_many_turned(const ConvTraits& layer) {
  return !layer.transposed && layer.last && layer.shape.outputs > kTurned;
}

bool has_few_turned(const ConvShape& shape, bool transposed) {
  if (shape.groups > 1) return false;
  const int64_t inputs = transposed ? shape.outputs : shape.inputs, outputs = transposed ? shape.inputs : shape.outputs;
  if (inputs <= kFewChannels) return outputs <= (transposed ? kTurned : kTurnedBackward);
  const bool strided = shape.stride.product() > 1 && !transposed;
  return outputs <= kFewChannels && shape.taps() > 1 && !strided;
}

// With large steps most of the time goes into copies of single pixels.
bool has_large_steps(const ConvShape& shape) {
  constexpr int64_t kStride = 16, kStridedTaps = 64;
  const int64_t stride = shape.stride.product();
  return stride > kStride || (stride > 1 && shape.taps() > kStridedTaps);
}

// So many phases of channels, each met by a single tap, that a cache has room for a few places of them.
bool has_narrow_strips(const ConvShape& shape, bool transposed) {
  constexpr int64_t kPhases = 1024;
  const bool single = !transposed && shape.groups == 1 && shape.stride.product() > 1 && shape.has_windows_apart();
  return single && shape.inputs * shape.taps() > kPhases;
}

// Whether so few pixels lie side by side that most of the time goes into copies. Then other kernels are faster, where
// there are some.
bool has_short_lines(const ConvShape& shape) {
  constexpr int64_t kShort = 4;
  const bool whole = shape.taps() == 1 && shape.stride.product() == 1;
  return (whole ? shape.size.product() : std::max(shape.size.column, shape.output_size().column)) <= kShort;
}

// Whether most of the places are pixels, or few channels are summed at the others.
bool is_dense(const ConvShape& shape) {
  constexpr double kPlaces = 3, kPlacesOfFew = 16;
  return places_each(shape) <= (shape.outputs / shape.groups <= kFewChannels ? kPlacesOfFew : kPlaces);
}

// Groups of eight channels, or a multiple, that Winograd's method takes in two dims, with as many multiplications for
// sixteen channels as there are here for four, on 4x4 tiles: as fast or faster, for all that their maps are copied, but
// where channels that are not there are multiplied, too.
bool has_winograd_groups(const ConvTraits& layer) {
  constexpr int64_t kChannels = 8;
  const ConvShape& shape = layer.shape;
  const int64_t channels = shape.inputs / shape.groups;
  if (layer.transposed || shape.groups == 1 || channels % kChannels != 0) return false;
  if (channels < kLanes && shape.inputs % kLanes != 0) return false;
  const std::optional<Method> method = float_method(shape, false);
  return method && is_winograd(*method);
}

// Strips know one level, which is enough for a layer of single pixels (strips_conv).
ConvTraits without_levels(ConvTraits layer) {
  if (layer.is_plain_conv() || layer.transposed || !layer.shape.is_pointwise()) return layer;
  layer.shape = layer.shape.without_levels();
  return layer;
}

bool has_strips(const ConvTraits& layer) {
  const ConvShape& shape = layer.shape;
  if (!strip_kernels() || layer.is_plain_conv() || layer.bfloat16 || !shape.has_one_level()) return false;
  if (shape.is_depthwise() || has_large_steps(shape) || !is_dense(shape)) return false;
  if (has_narrow_strips(shape, layer.transposed)) return false;
  if (!(layer.last ? has_few_turned(shape, layer.transposed) : has_few_channels(layer))) return false;
  return !has_short_lines(shape) || !float_method(shape, layer.transposed);
}

}  // namespace

// Convolutions with a stride and many taps, on short lines, the vendor runs as fast, and those with many channels to
// turn; by AVX2 on any lines, where no activation follows that strips save the pass for.
bool suits_strips(const ConvTraits& given, bool passes) {
  const ConvTraits layer = without_levels(given);
  if (is_direct_first_layer(layer)) return false;
  constexpr int64_t kManyTaps = 25, kShortLine = 64;
  const ConvShape& shape = layer.shape;
  const bool strided = shape.stride.product() > 1 && shape.taps() > kManyTaps && shape.groups == 1;
  const bool gains = shape.output_size().column >= kShortLine && (passes || active_isa() == Isa::kAvx512);
  const bool vendors = !layer.transposed && strided && !gains;
  return !vendors && !has_many_turned(layer) && !has_winograd_groups(layer) && has_strips(layer);
}

bool suits_strips_backward(const ConvTraits& given, const Needs& needs) {
  const ConvTraits layer = without_levels(given);
  // A bias gradient without that of the weight only strips have.
  const bool winograd = (needs.v || !needs.bias) && has_winograd_groups(layer);
  return !winograd && (needs.x || !has_many_turned(layer)) && has_strips(layer);
}

}  // namespace wnfused::cpu

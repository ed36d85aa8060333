// When the kernels of conv_layer/ are faster than the vendor's.
#include "cpu/choice/rules.h"
#include "cpu/conv_layer/pair_layer.h"
#include "cpu/machine/isa.h"
#include "cpu/machine/parallel.h"
#include "cpu/pieces/pieces.h"

namespace wnfused::cpu {
namespace {

int64_t output_floats(const ConvShape& shape) { return shape.outputs * shape.output_pixels(); }

int64_t products_each(const ConvTraits& layer) { return layer.products() / worker_limit(); }

// Whether a transposed layer, or the data gradient of another one, makes so large a map of so few pixels that its
// windows meet the padding mostly, which kDirect leaves out and all others multiply.
bool meets_padding(const ConvShape& shape) {
  constexpr int64_t kTimes = 3;
  return shape.size.product() >= kTimes * shape.output_size().product() * shape.stride.product();
}

// First layers, of images or signals, that the vendor's kernels run faster, measured on Zen 4: those whose output is
// more than a call's cost, but for
//
//   forward    over two dims those with an activation to gain from, in NCHW where there are few taps; in one dim those
//              with a stride
//   backward   windows of several levels, without the input's gradient; with it, in NCHW over two dims, windows of one
//              column and those with a stride of 1
bool is_vendors_first_layer(const ConvTraits& layer, bool passes) {
  constexpr int64_t kWide = 64;
  const ConvShape& shape = layer.shape;
  if (!shape.has_thin_input() || shape.kernel.level > 1 || output_floats(shape) <= kLargeFirstLayer) return false;
  if (layer.dims == 1) return shape.stride.column == 1;
  const bool fills = active_isa() == Isa::kAvx512 || shape.outputs >= kWide;
  return !passes || !(layer.last ? fills : is_direct_first_layer(layer));
}

bool is_vendors_first_layer_backward(const ConvTraits& layer, bool input) {
  constexpr int64_t kLargeMap = int64_t{1} << 17, kColours = 3;
  const ConvShape& shape = layer.shape;
  if (!shape.has_thin_input() || shape.inputs > kColours || output_floats(shape) <= kLargeMap) return false;
  if (shape.kernel.level > 1) return input;
  const bool strided_rows = shape.kernel.column > 1 && shape.stride.product() > 1;
  return !input || layer.last || layer.dims == 1 || strided_rows;
}

// Groups on large maps in NCHW that the vendor runs faster: those with few products for each entry of x, which is
// copied, and forward those of four channels by pieces.
bool are_vendors_groups(const ConvTraits& layer, Method method, bool forward) {
  constexpr int64_t kLargeMap = int64_t{1} << 18, kForward = 80, kBackward = 48;
  const ConvShape& shape = layer.shape;
  const int64_t outputs = shape.outputs / shape.groups;
  if (shape.groups == 1 || shape.is_depthwise() || layer.last || output_floats(shape) < kLargeMap) return false;
  if (is_winograd(method)) return false;
  if (method == Method::kPieces) return forward && outputs < kLanes;
  return outputs * shape.taps() < (forward ? kForward : kBackward) * shape.stride.product();
}

// Images of a single pixel, of y's map or transposed of x's, would leave most rows of a tile empty.
bool fills_tiles(const ConvShape& shape) {
  return active_pair_products() == PairProducts::kDots || shape.taps() == 1 || shape.output_size().product() > 1;
}

// Dot products are twice float32's: Winograd's method in two dims saves more than that, and where a bank of many taps
// streams from the second-level cache for many pixels, the vendor's are faster.
bool suits_dots(const ConvTraits& layer, bool backward) {
  constexpr int64_t kMany = 300'000'000;
  const ConvShape& shape = layer.shape;
  if ((layer.transposed || backward) && meets_padding(shape)) return false;
  if (layer.transposed) return true;
  if (takes_winograd(shape)) return false;
  const bool wide = suits_pieces(shape) && shape.size.row > 1 && shape.dilation.product() == 1;
  return !wide || products_each(layer) <= kMany;
}

// Whether a layer in bfloat16 is fastest as products of pairs of this library's (pair_window.h).
bool suits_pairs(const ConvTraits& layer, bool backward) {
  constexpr Triple kNone{0, 0, 0};
  const ConvShape& shape = layer.shape;
  if (!layer.bfloat16 || !pair_window_kernels() || !suits_pair_window(shape) || !fills_tiles(shape)) return false;
  if (active_pair_products() == PairProducts::kDots && !suits_dots(layer, backward)) return false;
  return copied_floats(shape, kNone) <= kMostCopied;  // of two bytes each; the backward copies up to twice as many
}

// Whether groups that share blocks (Geometry::sharing) multiply so many zeros that Winograd's method saves no more than
// that; so it is in channels_last, and in NCHW, where the vendor is slower, of wide groups.
bool has_many_zeros(const ConvTraits& layer) {
  constexpr int64_t kWide = 64;
  const int64_t channels = layer.shape.inputs / layer.shape.groups;
  const bool shared = layer.shape.groups > 1 && channels > kLanes && channels % kLanes != 0;
  return shared && (layer.last || channels >= kWide);
}

// Whether the vendor's products of bfloat16 are faster than this method's of float32, of which they are twice as many,
// sixteen times on tiles: Winograd's method in two dims saves more than twice, along lines about as many, and depthwise
// layers move more than they multiply. Grouped ones the vendor multiplies at a fraction of its speed. A transposed
// layer of the vendor's is composed with other calls.
bool is_vendors_bfloat16(const ConvTraits& layer, Method method) {
  constexpr int64_t kTimes = 6, kTimesZeros = 8, kTimesComposed = 4;
  const ConvShape& shape = layer.shape;
  if (!layer.bfloat16) return false;
  if (layer.transposed) return !meets_padding(shape) && has_many_bfloat16_products(layer, kTimesComposed);
  if (!has_many_bfloat16_products(layer)) return false;
  if (active_pair_products() == PairProducts::kTiles) return true;
  if (is_winograd(method)) return has_many_zeros(layer) && has_many_bfloat16_products(layer, kTimesZeros);
  if (method == Method::kPieces)
    return shape.groups == 1 && shape.dilation.column == 1 && has_many_bfloat16_products(layer, kTimes);
  return method == Method::kDirect && !shape.is_depthwise();
}

}  // namespace

// Measured on AVX-512.
bool is_direct_first_layer(const ConvTraits& layer) {
  constexpr int64_t kFewTaps = 16;
  const ConvShape& shape = layer.shape;
  if (layer.transposed || layer.last || layer.dims != 2 || layer.bfloat16 || !shape.has_thin_input()) return false;
  if (active_isa() != Isa::kAvx512 || shape.outputs < kLanes) return false;
  if (shape.taps() > kFewTaps && output_floats(shape) > kLargeFirstLayer) return false;
  return float_method(shape, false) == Method::kDirect;
}

bool has_many_bfloat16_products(const ConvTraits& layer, int64_t times) {
  // What a call of the vendor's costs beside its products, in multiply-adds of a worker.
  constexpr int64_t kCall = 5'000'000;
  const PairProducts products = active_pair_products();
  const bool has_instructions = products == PairProducts::kDots || products == PairProducts::kTiles;
  return has_instructions && products_each(layer) > times * kCall;
}

std::optional<Method> own_method(const ConvTraits& layer, const ForwardAsks& asks) {
  if (suits_pairs(layer, false)) return Method::kPairs;
  const std::optional<Method> method = float_method(layer.shape, layer.transposed, asks.kept);
  if (!method || is_vendors_bfloat16(layer, *method)) return std::nullopt;
  if (layer.transposed) return method;
  const bool vendors = is_vendors_first_layer(layer, asks.passes) || are_vendors_groups(layer, *method, true);
  return vendors ? std::nullopt : method;
}

std::optional<Method> own_method_backward(const ConvTraits& layer, const Needs& needs) {
  // A bias gradient without that of the weight would need a pass of its own.
  if (!needs.v && needs.bias) return std::nullopt;
  if (suits_pairs(layer, true)) return Method::kPairs;
  const std::optional<Method> method = float_method(layer.shape, layer.transposed);
  if (!method) return std::nullopt;
  if (is_vendors_bfloat16(layer, *method) && !meets_padding(layer.shape)) return std::nullopt;
  if (layer.transposed) return method;
  const bool vendors = is_vendors_first_layer_backward(layer, needs.x) || are_vendors_groups(layer, *method, false);
  return vendors ? std::nullopt : method;
}

bool is_worth_keeping(const ConvShape& shape, Method method) {
  constexpr int64_t kLeastWeights = 1 << 16;
  // Winograd's banks in two dims have 1.8 or 4 times as many numbers as v: reading those takes longer than making them.
  if (shape.is_depthwise() || is_winograd(method)) return false;
  return shape.inputs * shape.outputs / shape.groups * shape.taps() >= kLeastWeights;
}

}  // namespace wnfused::cpu

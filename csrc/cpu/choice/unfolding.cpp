// When a layer is a linear one of its windows. What unfolding saves is reading and packing the weights anew and, from
// 32 MB on, fresh memory for them; what it costs is to multiply by the padding and, forward, to put rows in the place
// of a map in NCHW.
#include "cpu/choice/rules.h"
#include "cpu/linear/few.h"
#include "cpu/linear/linear_layer.h"
#include "cpu/machine/isa.h"

namespace wnfused::cpu {
namespace {

// Pixels. Up to kFewPixels the time of such a layer is that of its weights.
constexpr int64_t kFewPixels = 16, kMostPixels = 256;

// An image cut into patches, of more taps than the kernels of conv_layer/ have.
bool is_patches(const ConvShape& shape) { return shape.taps() > kMaxWindowTaps && shape.has_windows_apart(); }

// 1x1 layers by AVX2, whose linear kernels for many rows are panels alone.
bool has_narrow_panels(const ConvShape& shape) { return shape.taps() == 1 && active_isa() == Isa::kAvx2; }

bool can_unfold(const ConvTraits& layer) {
  const ConvShape& shape = layer.shape;
  if (layer.is_plain_conv() || shape.groups > 1 || shape.outputs == 1) return false;
  return linear_kernels(false, shape.output_pixels()) || has_narrow_panels(shape);
}

bool goes_by_winograd(const std::optional<Method>& method) { return method && is_winograd(*method); }

// Maps in bfloat16 of few pixels are nothing beside the weights, but of many the vendor has faster products.
bool is_outdone_in_bfloat16(const ConvTraits& layer) {
  constexpr int64_t kTimes = 4;
  if (!layer.bfloat16 || layer.transposed || layer.shape.output_pixels() <= kFewPixels) return false;
  return has_many_bfloat16_products(layer, kTimes);
}

// Whether pixels are rows of a linear layer as they lie, x's and y's, and nothing is copied: in floats for its panels
// (linear/panel.h), or few outputs (linear/few.h), by AVX2 as in bfloat16 for tiles where so many weights to a pixel
// are most of the work.
bool has_pixels_for_rows(const ConvTraits& layer) {
  constexpr int64_t kManyWeights = 1024;
  const Isa isa = active_isa();
  const ConvShape& shape = layer.shape;
  const bool lie = layer.rows && layer.last && shape.is_pointwise() && shape.groups == 1;
  if (!lie || layer.transposed || layer.plain) return false;
  if (!layer.bfloat16 && (isa == Isa::kAvx512 || (isa == Isa::kAvx2 && shape.outputs <= kFew))) return true;
  if (shape.outputs == 1) return false;
  const bool multiplies = layer.bfloat16 ? has_tiles() : isa == Isa::kAvx2;
  return multiplies && shape.inputs * shape.outputs >= kManyWeights * shape.output_pixels();
}

}  // namespace

bool suits_unfolding(const ConvTraits& layer) {
  constexpr int64_t kWeightsAPixel = 4096, kLightWeightsAPixel = 1024;
  constexpr int64_t kPatches = 64, kPlanes = 64, kHeavy = int64_t{1} << 23;
  if (has_pixels_for_rows(layer)) return true;
  if (!can_unfold(layer) || is_outdone_in_bfloat16(layer)) return false;
  const ConvShape& shape = layer.shape;
  const int64_t pixels = shape.output_pixels(), weights = shape.inputs * shape.outputs;
  if (pixels <= kFewestPixels || (is_patches(shape) && pixels <= kPatches)) return true;
  // The output is to be in NCHW, over two dims, which the vendor has kernels for. Of a transposed layer windows of y
  // are put together in every case.
  const bool planes = layer.dims == 2 && !layer.last && !layer.transposed;
  if (planes && pixels > (shape.taps() > 1 ? kPlanes : kFewPixels) && weights * shape.taps() < kHeavy) return false;
  // A method of conv_layer/ packs weights bundle by bundle, in a cache, but a transposed window all of them at once.
  std::optional<Method> own;
  if (!layer.transposed) own = float_method(shape, false);
  const bool packs = own == Method::kDirect && active_isa() == Isa::kAvx512;
  const bool light = (layer.transposed && !layer.bfloat16) || has_narrow_panels(shape);
  const int64_t least = light ? kLightWeightsAPixel : kWeightsAPixel;
  return pixels <= (packs || goes_by_winograd(own) ? kFewPixels : kMostPixels) && weights >= least * pixels;
}

bool rows_outdo_banks(const ConvTraits& layer) {
  if (layer.bfloat16 || active_isa() != Isa::kAvx512) return false;
  return has_pixels_for_rows(layer) && layer.shape.output_pixels() > kWorthPacking;
}

bool suits_unfolding_backward(const ConvTraits& layer, const Needs& needs) {
  constexpr int64_t kNarrow = 4096, kWeightsAPixel = 2048, kBesideVendor = 1024, kInPlace = 300, kPatches = 64;
  const ConvShape& shape = layer.shape;
  if (has_pixels_for_rows(layer)) return true;
  if (!can_unfold(layer)) return false;
  // The vendor's backward of patches takes twice as long as this in float32.
  const bool patches = is_patches(shape);
  if (!patches && is_outdone_in_bfloat16(layer)) return false;
  const int64_t pixels = shape.output_pixels(), weights = shape.inputs * shape.outputs;
  if (pixels <= kFewestPixels || (pixels <= kFewPixels && weights >= kNarrow)) return true;
  if (patches) return needs.x || pixels <= kPatches;
  if (layer.rows && shape.is_pointwise() && !layer.transposed) return weights >= kInPlace * pixels;
  const std::optional<Method> own = float_method(shape, layer.transposed);
  if (pixels > (goes_by_winograd(own) ? kFewPixels : kMostPixels)) return false;
  return weights >= kWeightsAPixel * pixels || (weights >= kBesideVendor * pixels && !own);
}

}  // namespace wnfused::cpu

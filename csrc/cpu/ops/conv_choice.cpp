#include "cpu/ops/conv_choice.h"

#include <torch/csrc/stable/library.h>

#include <string>

#include "cpu/conv_layer/pair_layer.h"
#include "cpu/layer/tensor.h"
#include "cpu/machine/isa.h"
#include "cpu/machine/parallel.h"
#include "cpu/ops/conv_extents.h"

namespace wnfused::cpu {
namespace {

// 3x3 layers that keep the size of a map, and over three dims 3x3x3 and 1x3x3 ones.
bool takes_winograd(const ConvShape& shape) {
  const auto is = [&](int64_t Triple::*at, int64_t kernel) {
    return shape.kernel.*at == kernel && shape.stride.*at == 1 && shape.dilation.*at == 1 &&
           2 * (shape.padding.*at) == kernel - 1;
  };
  return shape.groups == 1 && is(&Triple::row, 3) && is(&Triple::column, 3) &&
         (is(&Triple::level, 1) || is(&Triple::level, kMaxLevelTaps));
}

// Groups whose outputs are whole blocks; their inputs, the data gradient's outputs, may be a half or a quarter of one. And
// groups of four channels by pieces: all else that shares blocks of outputs has too many zeros among its products, and
// the vendor is as fast (bench/NOTES.md).
bool suits_groups(const ConvShape& shape) {
  const int64_t inputs = shape.inputs / shape.groups, outputs = shape.outputs / shape.groups;
  const bool shared = (inputs == 4 || inputs == 8) && shape.groups % (kLanes / inputs) == 0;
  if (inputs % kLanes != 0 && !shared) return false;
  return outputs % kLanes == 0 || (inputs == 4 && outputs == 4 && suits_pieces(shape));
}

// Whether the vendor sums over taps in three dims as fast as these kernels, and finds the weight gradient faster: so it
// does with stride 1, one group and more taps than one (measured on Zen 4: these kernels have 1.0 and 0.8 to 0.95 of
// its speed). A single small volume it unfolds, at a third of that speed.
bool suits_vendor(const ConvShape& shape) {
  constexpr int64_t kUnfolded = 20480;  // channels x levels x rows, torch's own bound
  const bool unfolds = shape.images == 1 && shape.inputs * shape.size.level * shape.size.row <= kUnfolded;
  return !shape.has_one_level() && shape.stride.product() == 1 && shape.taps() > 1 && shape.groups == 1 && !unfolds;
}

// At least a sixth of the products must not be padding.
constexpr int64_t kPadding = 6;

// Whether so many weights of a tap are worth packing for so many rows of products, tiles or pixels. Group by group
// (divide_groups) they are for any number; without that, and by narrow vectors, packing is slower.
bool is_worth_packing(int64_t weights, int64_t rows, bool winograd, bool grouped) {
  const Isa isa = active_isa();
  if (grouped && (isa == Isa::kAvx512 || (isa == Isa::kAvx2 && winograd))) return true;
  return weights <= (isa == Isa::kAvx512 ? 8192 : 2048) * rows;
}

// Memory for copies of maps in other layouts, x and y and, backward, as much again: 2 GB in floats.
constexpr double kCopies = 1 << 29;

// Floats of a map with so wide a border on every side. No map is too large for a double.
double map_floats(const MapShape& map, const Triple& size, const Triple& border) {
  const auto extent = [&](int64_t Triple::*at) { return static_cast<double>(size.*at + 2 * (border.*at)); };
  return extent(&Triple::level) * extent(&Triple::row) * extent(&Triple::column) * static_cast<double>(map.images) *
         static_cast<double>(map.padded_channels);
}

double map_entries(int64_t images, int64_t channels, const Triple& size) {
  return map_floats(map_of_size(images, channels, size), size, {0, 0, 0});
}

int64_t output_floats(const ConvShape& shape) { return shape.images * shape.outputs * shape.output_size().product(); }

// Multiply-adds of a layer, and of each worker.
int64_t products_each(const ConvShape& shape) {
  return output_floats(shape) * (shape.inputs / shape.groups) * shape.taps() / worker_limit();
}

// Whether the vendor has instructions for products of bfloat16 here.
bool has_bfloat16_products() {
  const PairProducts products = active_pair_products();
  return products == PairProducts::kDots || products == PairProducts::kTiles;
}

// First layers, of images or signals, that the vendor's kernels run faster, measured on Zen 4 (bench/NOTES.md): those
// whose output is more than a call's cost, but for
//
//   forward    channels_last with an activation to gain from, and in one dim those with a stride; in NCHW these kernels
//              write y by transposed panels
//   backward   windows of several levels, without the input's gradient; with it, in NCHW over two dims, windows of one
//              column and those with a stride of 1
bool is_vendors_first_layer(const ConvLayer& layer, bool last, bool passes) {
  constexpr int64_t kLargeMap = int64_t{1} << 18, kWide = 64;
  const ConvShape& shape = layer.shape;
  if (!shape.has_thin_input() || shape.kernel.level > 1 || output_floats(shape) <= kLargeMap) return false;
  if (layer.v.dim() == 3) return shape.stride.column == 1;
  return !(last && passes && shape.outputs >= kWide);
}

bool is_vendors_first_layer_backward(const ConvLayer& layer, bool last, bool input) {
  constexpr int64_t kLargeMap = int64_t{1} << 17, kColours = 3;
  const ConvShape& shape = layer.shape;
  if (!shape.has_thin_input() || shape.inputs > kColours || output_floats(shape) <= kLargeMap) return false;
  if (shape.kernel.level > 1) return input;
  const bool strided_rows = shape.kernel.column > 1 && shape.stride.product() > 1;
  return !input || last || layer.v.dim() == 3 || strided_rows;
}

// Groups on large maps in NCHW that the vendor runs faster (bench/NOTES.md): those with few products for each entry of
// x, which is copied, and forward those of four channels by pieces.
bool are_vendors_groups(const ConvLayer& layer, bool last, bool forward) {
  constexpr int64_t kLargeMap = int64_t{1} << 18, kForward = 80, kBackward = 48;
  const ConvShape& shape = layer.shape;
  const int64_t outputs = shape.outputs / shape.groups;
  if (shape.groups == 1 || shape.is_depthwise() || last || output_floats(shape) < kLargeMap) return false;
  if (layer.method == Method::kPieces) return forward && outputs < kLanes;
  return outputs * shape.taps() < (forward ? kForward : kBackward) * shape.stride.product();
}

// How a layer is multiplied, or "vendor", for wnfused/frozen.py and the tests.
std::string cpu_conv_method(const Extents& maps, const Extents& kernel, const Extents& stride, const Extents& padding,
                            const Extents& dilation, int64_t groups, bool transposed, bool kept, bool bfloat16) {
  const ConvShape shape = listed_shape(maps, kernel, stride, padding, dilation, groups);
  if (bfloat16 && suits_pairs(shape, transposed, false)) return name_of(Method::kPairs);
  const std::optional<Method> method = conv_layer_method(shape, transposed, kept);
  return method ? name_of(*method) : "vendor";
}

// Images of a single pixel, of y's map or transposed of x's, would leave most rows of a tile empty.
bool fills_tiles(const ConvShape& shape) {
  return active_pair_products() == PairProducts::kDots || shape.taps() == 1 || shape.output_size().product() > 1;
}

// Dot products are twice float32's: Winograd's method in two dims saves more than that, and where a bank of many taps
// streams from the second-level cache for many pixels, the vendor's are faster.
bool suits_dots(const ConvShape& shape, bool transposed, bool backward) {
  constexpr int64_t kMany = 300'000'000;
  if ((transposed || backward) && meets_padding(shape)) return false;
  if (transposed) return true;
  if (takes_winograd(shape)) return false;
  const bool wide = suits_pieces(shape) && shape.size.row > 1 && shape.dilation.product() == 1;
  return !wide || products_each(shape) <= kMany;
}

}  // namespace

std::optional<Method> conv_layer_method(const ConvShape& shape, bool transposed, bool kept) {
  if (!shape.is_sound() || !shape.fits_window()) return std::nullopt;
  const Triple size = shape.output_size();
  const MapShape input = map_of_size(shape.images, shape.inputs, shape.size);
  const MapShape output = map_of_size(shape.images, shape.outputs, size);
  if (shape.groups > 1 && transposed) return std::nullopt;
  if (shape.is_depthwise())
    return shape.has_one_level() && has_small_tiles(shape) ? std::optional(Method::kDirect) : std::nullopt;
  if (shape.groups > 1 && !suits_groups(shape)) return std::nullopt;
  const int64_t weights = shape.inputs * shape.outputs / shape.groups;
  const bool thin = !transposed && shape.has_thin_input();
  const int64_t inputs = thin ? shape.inputs : input.padded_channels;
  if (shape.groups == 1 && kPadding * weights < inputs * output.padded_channels) return std::nullopt;
  constexpr Triple kNone{0, 0, 0};
  const double copies = map_floats(input, shape.size, thin ? shape.padding : kNone) + map_floats(output, size, kNone);
  if (2 * copies > kCopies) return std::nullopt;
  if (!transposed && !thin && takes_winograd(shape)) {
    const Method method = preferred_method(shape.images * shape.size.level, shape.size.row, shape.size.column);
    if (method != Method::kDirect) {
      const int64_t tile = method == Method::kWinograd4 ? 4 : 2;
      const int64_t tiles = shape.images * size.level * divide_up(size.row, tile) * divide_up(size.column, tile);
      // Over three levels each tile meets three banks.
      const bool one = shape.kernel.level == 1;
      const int64_t rows = one ? tiles : tiles * 2 / 3;
      return kept || is_worth_packing(weights, rows, true, one) ? std::optional(method) : std::nullopt;
    }
  }
  const Method method = !transposed && suits_pieces(shape) ? Method::kPieces : Method::kDirect;
  if (method == Method::kDirect && !transposed && !thin && suits_vendor(shape)) return std::nullopt;
  const bool grouped = method == Method::kDirect && !transposed && shape.groups == 1;
  const bool packs = kept || is_worth_packing(weights, output.pixels(), false, grouped);
  return packs ? std::optional(method) : std::nullopt;
}

bool meets_padding(const ConvShape& shape) {
  constexpr int64_t kTimes = 3;
  return shape.size.product() >= kTimes * shape.output_size().product() * shape.stride.product();
}

bool has_many_bfloat16_products(const ConvShape& shape, int64_t times) {
  // What a call of the vendor's costs beside its products, in multiply-adds of a worker.
  constexpr int64_t kCall = 5'000'000;
  return has_bfloat16_products() && products_each(shape) > times * kCall;
}

bool is_vendors_bfloat16(const ConvLayer& layer) {
  const ConvShape& shape = layer.shape;
  if (layer.method == Method::kPairs) return false;
  if (!is_bfloat16(layer.x) || !has_many_bfloat16_products(shape)) return false;
  // What is no product of pairs (suits_pairs). The vendor's products are twice as many as float32's, sixteen times on
  // tiles: Winograd's method in two dims saves more than twice, along lines about as many, and depthwise layers move more
  // than they multiply. Grouped ones the vendor multiplies at a fraction of its speed.
  if (active_pair_products() == PairProducts::kTiles) return true;
  if (layer.method == Method::kPieces) {
    constexpr int64_t kTimes = 6;
    return shape.groups == 1 && shape.dilation.column == 1 && has_many_bfloat16_products(shape, kTimes);
  }
  return layer.method == Method::kDirect && !shape.is_depthwise();
}

bool suits_pairs(const ConvShape& shape, bool transposed, bool backward) {
  if (!pair_window_kernels() || !suits_pair_window(shape) || !fills_tiles(shape)) return false;
  if (active_pair_products() == PairProducts::kDots && !suits_dots(shape, transposed, backward)) return false;
  const double entries = map_entries(shape.images, shape.inputs, shape.size) +
                         map_entries(shape.images, shape.outputs, shape.output_size());
  return entries <= 2 * kCopies;
}

bool is_vendors(const ConvLayer& layer, bool last, bool passes) {
  if (layer.method == Method::kPairs) return false;
  return is_vendors_first_layer(layer, last, passes) || are_vendors_groups(layer, last, true);
}

bool is_vendors_backward(const ConvLayer& layer, bool last, bool input) {
  if (layer.method == Method::kPairs) return false;
  return is_vendors_first_layer_backward(layer, last, input) || are_vendors_groups(layer, last, false);
}

}  // namespace wnfused::cpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CompositeExplicitAutograd, m) {
  m.impl("cpu_conv_method", TORCH_BOX(&wnfused::cpu::cpu_conv_method));
}

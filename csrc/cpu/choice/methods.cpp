// By which of their methods the kernels of conv_layer/ take a layer in float32.
#include "cpu/choice/rules.h"
#include "cpu/depthwise/depthwise.h"
#include "cpu/machine/isa.h"
#include "cpu/pieces/pieces.h"

namespace wnfused::cpu {
namespace {

// Whether groups of so many channels, a half or a quarter of a block, fill all blocks.
bool fill_blocks(const ConvShape& shape, int64_t channels) {
  return (channels == 4 || channels == 8) && shape.groups % groups_in_blocks(channels) == 0;
}

// Whether groups of so many channels, two or four of which fill blocks that they share, leave few enough products with
// zeros: four of them where each has less than three blocks, and the last ones where most of their blocks is channels.
bool share_blocks(const ConvShape& shape, int64_t channels) {
  const int64_t sharing = groups_in_blocks(channels);
  const bool fill = 4 * shape.inputs >= 3 * divide_up(shape.inputs, kLanes) * kLanes;
  return fill && (sharing <= 2 || (sharing == 4 && channels < 3 * kLanes));
}

// Groups that a sum over taps or pieces suits: whose outputs are whole blocks; their inputs, the data gradient's
// outputs, may be a half or a quarter of one. And groups of four channels by pieces: all else that shares blocks of
// outputs has too many zeros among its products, and the vendor is as fast.
bool suits_groups(const ConvShape& shape) {
  const int64_t inputs = shape.inputs / shape.groups, outputs = shape.outputs / shape.groups;
  if (inputs % kLanes != 0 && !fill_blocks(shape, inputs)) return false;
  return outputs % kLanes == 0 || (inputs == 4 && outputs == 4 && suits_pieces(shape));
}

// Whether the vendor sums over taps in three dims faster than these kernels: so it does by AVX2 with stride 1, one
// group and more taps than one. A single small volume it unfolds, at a third of that speed.
bool suits_vendor(const ConvShape& shape) {
  constexpr int64_t kUnfolded = 20480;  // channels x levels x rows, torch's own bound
  if (active_isa() == Isa::kAvx512 || shape.has_one_level() || shape.groups > 1) return false;
  const bool unfolds = shape.images == 1 && shape.inputs * shape.size.level * shape.size.row <= kUnfolded;
  return shape.stride.product() == 1 && shape.taps() > 1 && !unfolds;
}

// How many products a kernel may make for each that there is, the others with padding of either map: by AVX2, which
// leaves an empty half of a block out, those of 8 inputs and one output.
int64_t most_padding() { return active_isa() == Isa::kAvx2 ? 2 * kLanes : 6; }

// Whether so many weights of a tap are worth packing for so many rows of products, tiles or pixels. Bundle by
// bundle (divide_into_bundles) they are for any number; without that, and by narrow vectors, packing is slower.
bool is_worth_packing(int64_t weights, int64_t rows, bool winograd, bool by_bundles) {
  const Isa isa = active_isa();
  if (by_bundles && (isa == Isa::kAvx512 || (isa == Isa::kAvx2 && winograd))) return true;
  return weights <= (isa == Isa::kAvx512 ? 8192 : 2048) * rows;
}

// Floats of a map with so wide a border on every side. No map is too large for a double.
double map_floats(const MapShape& map, const Triple& size, const Triple& border) {
  const auto extent = [&](int64_t Triple::*at) { return static_cast<double>(size.*at + 2 * (border.*at)); };
  return extent(&Triple::level) * extent(&Triple::row) * extent(&Triple::column) * static_cast<double>(map.images) *
         static_cast<double>(map.padded_channels);
}

}  // namespace

bool takes_winograd(const ConvShape& shape) {
  const int64_t inputs = shape.inputs / shape.groups, outputs = shape.outputs / shape.groups;
  const bool shared = inputs == outputs && share_blocks(shape, inputs);
  const bool blocks = (inputs % kLanes == 0 && outputs % kLanes == 0) || shared;
  const auto is = [&](int64_t Triple::*at, int64_t kernel) {
    return shape.kernel.*at == kernel && shape.stride.*at == 1 && shape.dilation.*at == 1 &&
           2 * (shape.padding.*at) == kernel - 1;
  };
  return (shape.groups == 1 || (blocks && shape.kernel.level == 1)) && is(&Triple::row, 3) && is(&Triple::column, 3) &&
         (is(&Triple::level, 1) || is(&Triple::level, kMaxLevelTaps));
}

double copied_floats(const ConvShape& shape, const Triple& border) {
  constexpr Triple kNone{0, 0, 0};
  const Triple size = shape.output_size();
  return map_floats(map_of_size(shape.images, shape.inputs, shape.size), shape.size, border) +
         map_floats(map_of_size(shape.images, shape.outputs, size), size, kNone);
}

namespace {

// The one of Winograd's methods in two dims that a layer is worth.
std::optional<Method> winograd_method(const ConvShape& shape) {
  if (!takes_winograd(shape)) return std::nullopt;
  const Method method = preferred_method(shape.images * shape.size.level, shape.size.row, shape.size.column);
  return method == Method::kDirect ? std::nullopt : std::optional(method);
}

}  // namespace

std::optional<Method> float_method(const ConvShape& shape, bool transposed, bool kept) {
  if (!shape.fits_window() || (shape.groups > 1 && transposed)) return std::nullopt;
  if (shape.is_depthwise())
    return shape.has_one_level() && has_small_tiles(shape) ? std::optional(Method::kDirect) : std::nullopt;
  const bool thin = !transposed && shape.has_thin_input();
  const std::optional<Method> winograd = transposed || thin ? std::nullopt : winograd_method(shape);
  if (shape.groups > 1 && !winograd && !suits_groups(shape)) return std::nullopt;
  const Triple size = shape.output_size();
  const MapShape input = map_of_size(shape.images, shape.inputs, shape.size);
  const MapShape output = map_of_size(shape.images, shape.outputs, size);
  const int64_t weights = shape.inputs * shape.outputs / shape.groups;
  const int64_t inputs = thin ? shape.inputs : input.padded_channels;
  if (shape.groups == 1 && most_padding() * weights < inputs * output.padded_channels) return std::nullopt;
  if (2 * copied_floats(shape, thin ? shape.padding : Triple{0, 0, 0}) > kMostCopied) return std::nullopt;
  if (winograd) {
    const int64_t tile = *winograd == Method::kWinograd4 ? 4 : 2;
    const int64_t tiles = shape.images * size.level * divide_up(size.row, tile) * divide_up(size.column, tile);
    const int64_t rows = shape.kernel.level == 1 ? tiles : tiles * 2 / 3;  // each tile meets a bank a level
    return is_worth_packing(weights, rows, true, true) ? winograd : std::nullopt;  // whose banks are not kept
  }
  const Method method = !transposed && suits_pieces(shape) ? Method::kPieces : Method::kDirect;
  if (method == Method::kDirect && !transposed && !thin && suits_vendor(shape)) return std::nullopt;
  const bool by_bundles = method == Method::kDirect && !transposed && shape.groups == 1;
  const bool packs = kept || is_worth_packing(weights, output.pixels(), false, by_bundles);
  return packs ? std::optional(method) : std::nullopt;
}

}  // namespace wnfused::cpu

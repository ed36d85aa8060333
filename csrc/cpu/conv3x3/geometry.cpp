// How 3x3 convolutions are cut into panels, chunks, slices and groups; see division.h for the terms.
#include <algorithm>

#include "cpu/conv3x3/geometry.h"

namespace wnfused::cpu {

Method preferred_method(int64_t images, int64_t height, int64_t width) {
  // Multiply-adds in units of C^2, and what a plane of the bank costs to pack and to finish, as if it were rows more. A
  // panel of one pixel of many images skips the taps that fall outside the map; a panel that mixes pixels multiplies by
  // zeros. Transforms cost Winograd about 40% on top.
  constexpr int64_t kPack = 6;
  const int64_t pixels = images >= kLanes ? (3 * height - 2) * (3 * width - 2) : kTaps * height * width;
  const int64_t direct = images * pixels + kTaps * kPack;
  const auto winograd = [&](int64_t tile) {
    return (tile + 2) * (tile + 2) * (images * divide_up(height, tile) * divide_up(width, tile) + kPack);
  };
  if (std::min(winograd(2), winograd(4)) * 14 >= direct * 10) return Method::kDirect;
  return winograd(4) < winograd(2) ? Method::kWinograd4 : Method::kWinograd2;
}

const char* name_of(Method method) {
  switch (method) {
    case Method::kDirect:
      return "direct";
    case Method::kWinograd2:
      return "winograd2";
    case Method::kWinograd4:
      return "winograd4";
    case Method::kLines:
      return "lines";
    case Method::kPieces:
      return "pieces";
    case Method::kPairs:
      return "pairs";
    case Method::kPositions:
      return "positions";
  }
  return "unknown";
}

namespace {

// Of the only panel of so many units: rows that it does not need spread those that it does over a part of a cache's
// sets.
int64_t rows_of_one(int64_t units, int64_t most) {
  constexpr int64_t kRows = 4;  // register tiles have a multiple of them
  return std::min(most, round_up(std::max<int64_t>(units, 1), kRows));
}

// Divides the layer of several groups: an item reads the channels of one, and multiplies by a bank that stays in a
// worker's cache.
void divide_by_convolution_groups(Geometry& geometry) {
  const int64_t block = geometry.planes * geometry.block_floats();
  int64_t blocks = geometry.group_blocks;
  while (blocks > 1 && (geometry.group_blocks % blocks != 0 || blocks * block > kBankCache)) --blocks;
  geometry.conv_bundle_blocks = blocks;
  geometry.conv_bundles = divide_up(geometry.output_blocks, blocks);
  geometry.weights_stay = geometry.own_banks = geometry.by_bundles = true;
  geometry.conv_rows = kLanes;
  geometry.conv_chunks = divide_up(geometry.units, geometry.conv_rows);
  geometry.wgrad_bundle_blocks = geometry.group_blocks % kMaxBundleBlocks == 0 ? kMaxBundleBlocks : 1;
  geometry.wgrad_bundles = divide_up(geometry.output_blocks, geometry.wgrad_bundle_blocks);
}

}  // namespace

Geometry make_single_geometry(int64_t images, const Levels& levels, const Channels& channels, int64_t height,
                              int64_t width, Method method, int64_t workers) {
  Geometry geometry{};
  static_cast<MapShape&>(geometry) = map_shape(images * levels.of_map, channels.inputs, height, width);
  geometry.levels = levels.of_map;
  geometry.level_taps = levels.of_kernel;
  geometry.outputs = channels.outputs;
  geometry.output_blocks = divide_up(channels.outputs, kLanes);
  geometry.padded_outputs = geometry.output_blocks * kLanes;
  geometry.sharing = channels.groups == 1 ? 1 : groups_in_blocks(channels.outputs / channels.groups);
  geometry.groups = divide_up(channels.groups, geometry.sharing);
  geometry.depth = channels.inputs / channels.groups * geometry.sharing;
  geometry.depth_blocks = divide_up(geometry.depth, kLanes);
  geometry.group_blocks = geometry.sharing > 1 ? geometry.depth_blocks : geometry.output_blocks / geometry.groups;
  geometry.method = method;
  geometry.tile = method == Method::kWinograd4 ? 4 : method == Method::kWinograd2 ? 2 : 1;
  geometry.tile_rows = divide_up(height, geometry.tile);
  geometry.tile_cols = divide_up(width, geometry.tile);
  geometry.units = geometry.images * geometry.tile_rows * geometry.tile_cols;
  geometry.planes = geometry.is_winograd() ? (geometry.tile + 2) * (geometry.tile + 2) : kTaps;
  geometry.plane_stride = geometry.gradient_stride = geometry.output_blocks * geometry.gradient_floats() + kLanes;

  // Panels of 16 rows stay in the first-level cache while there are few channels; with more of them the bank streams
  // past from the second level, and 32 rows halve that stream.
  const int64_t rows = geometry.depth_blocks <= 1 || geometry.tile == 4 ? 16 : 32;
  // Gathering transforms what it reads.
  constexpr int64_t kStay = 6;
  const Work work{geometry.output_blocks, geometry.bank_size(), geometry.map_size(), geometry.gradient_size(),
                  rows,                   16,                   workers,             kStay};
  divide_convolution(work, [&](int64_t rows) { return divide_up(geometry.units, rows); }, geometry);
  if (geometry.conv_chunks <= 1) geometry.conv_rows = rows_of_one(geometry.units, geometry.conv_rows);
  int64_t slice_units = (geometry.tile == 4 ? 2 : 4) * geometry.padded_channels;
  // So many groups are parallel enough.
  if (geometry.groups > 1) slice_units = std::max(slice_units, divide_up(geometry.units * geometry.groups, kMaxSlices));
  divide_gradient(work, geometry.units, slice_units, geometry);
  if (geometry.groups > 1) divide_by_convolution_groups(geometry);
  // Reading panels again from the last level of cache is cheaper than transforming their inputs again for every bundle.
  constexpr int64_t kKeptFloats = 3 << 19;
  const int64_t panels = divide_up(std::min(geometry.wgrad_slice_units, geometry.units), geometry.wgrad_rows);
  if (panels <= 1) geometry.wgrad_rows = rows_of_one(geometry.units, geometry.wgrad_rows);
  const int64_t floats = panels * geometry.wgrad_rows * geometry.planes * geometry.padded_channels;
  const bool same = geometry.is_winograd() && geometry.level_taps == 1 && geometry.groups == 1;
  geometry.wgrad_keeps = same && geometry.wgrad_bundles > workers && floats <= kKeptFloats;
  geometry.wgrad_panels = geometry.is_winograd() && (geometry.wgrad_keeps || panels == 1) ? panels : 0;
  geometry.wgrad_bundles *= geometry.level_taps;
  return geometry;
}

void pack_by_bundles(Geometry& geometry, int64_t workers) {
  // Floats from which packing a bank in a worker's cache, again for every chunk, is faster than reading it from afar.
  // Of three levels a chunk's panels are more than that cache holds, and are read from afar for every bundle instead.
  constexpr int64_t kFar = 1 << 19, kFarLevels = 1 << 21;
  const bool takes_panels = geometry.is_winograd() && geometry.units > 0;
  const bool one = geometry.level_taps == 1, far = geometry.bank_size() > (one ? kFar : kFarLevels);
  const bool dominate = geometry.weights_dominate && (one || geometry.units <= kMaxPanelRows);
  const bool wide = geometry.groups == 1 && (dominate || far);
  const int64_t block = geometry.level_taps * geometry.planes * geometry.block_floats();
  if (!takes_panels || !wide || !divide_into_bundles(1, block, geometry)) return narrow_banks(geometry);
  // A chunk for every worker, if that leaves enough rows for what it costs to pack.
  constexpr int64_t kRows = 48, kLeastRows = 24;
  int64_t chunks = geometry.units <= kMaxPanelRows ? 1 : divide_up(geometry.units, kRows);
  const int64_t even = round_up(chunks, workers);
  if (even * kLeastRows <= geometry.units) chunks = even;
  geometry.conv_rows = round_up(divide_up(geometry.units, chunks), kLanes);
  geometry.conv_chunks = divide_up(geometry.units, geometry.conv_rows);
  if (geometry.conv_chunks == 1) geometry.conv_rows = rows_of_one(geometry.units, geometry.conv_rows);
  geometry.weights_stay = geometry.conv_chunks == 1;
}

void finish_with_sums(Geometry& geometry, int64_t workers) {
  constexpr int64_t kItemsEach = 2;
  const int64_t bundles = geometry.wgrad_bundles / geometry.level_taps;
  const bool enough = geometry.level_taps == 1 || bundles >= kItemsEach * workers;
  if (!geometry.is_winograd() || geometry.wgrad_slices > 1 || !enough) return;
  geometry.wgrad_finishes = true;
  geometry.wgrad_bundles = bundles;
  geometry.gradient_stride = geometry.wgrad_bundle_blocks * geometry.gradient_floats() + kLanes;
}

Geometry make_geometry(int64_t images, int64_t channels, int64_t height, int64_t width, int64_t blocks, Method method,
                       int64_t workers) {
  Geometry geometry = make_single_geometry(images, {1, 1}, {channels, channels, 1}, height, width, method, workers);
  geometry.blocks = blocks;
  return geometry;
}

}  // namespace wnfused::cpu

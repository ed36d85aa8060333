// How a stage is cut into panels, chunks, slices and groups. See stage.h for the terms.
#include <algorithm>

#include "stage.h"

namespace wnfused::cpu {
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Output blocks that one pass of the register tile covers.
constexpr int64_t kGroupBlocks = 2;

// Fewer items than this a phase leave cores idle: cut the output channels too.
constexpr int64_t kEnoughItems = 8;

// Slices of a weight gradient: each costs a bank of memory and one more term of the final sum.
constexpr int64_t kMaxSlices = 16;

}  // namespace

Method preferred_method(int64_t images, int64_t height, int64_t width) {
  // Multiply-adds in units of C^2 an image. A panel of one pixel of many images skips the taps that fall outside the
  // map; a panel that mixes pixels multiplies by zeros. Transforms cost Winograd about 40% on top.
  const int64_t direct = images >= kLanes ? (3 * height - 2) * (3 * width - 2) : kTaps * height * width;
  const int64_t winograd = kPositions * divide_up(height, 2) * divide_up(width, 2);
  return winograd * 14 < direct * 10 ? Method::kWinograd : Method::kDirect;
}

Geometry make_geometry(int64_t images, int64_t channels, int64_t height, int64_t width, int64_t blocks, Method method) {
  Geometry geometry{};
  geometry.images = images;
  geometry.channels = channels;
  geometry.height = height;
  geometry.width = width;
  geometry.blocks = blocks;
  geometry.channel_blocks = divide_up(channels, kLanes);
  geometry.padded_channels = geometry.channel_blocks * kLanes;
  geometry.method = method;
  geometry.tile_rows = divide_up(height, 2);
  geometry.tile_cols = divide_up(width, 2);
  const bool winograd = method == Method::kWinograd;
  geometry.units = winograd ? images * geometry.tile_rows * geometry.tile_cols : images * height * width;
  geometry.planes = winograd ? kPositions : kTaps;
  geometry.plane_stride = geometry.padded_channels * geometry.padded_channels + kLanes;

  // Panels of 16 rows stay in the first-level cache while there are few channels; with more of them the bank streams
  // past from the second level, and 32 rows halve that stream.
  geometry.conv_rows = geometry.channel_blocks <= 1 ? 16 : 32;
  if (geometry.units <= 32 * kEnoughItems) geometry.conv_rows = 16;
  geometry.conv_chunks = divide_up(geometry.units, geometry.conv_rows);
  const bool split = geometry.conv_chunks < kEnoughItems;
  geometry.conv_group_blocks = split ? std::min(kGroupBlocks, geometry.channel_blocks) : geometry.channel_blocks;
  geometry.conv_groups = divide_up(geometry.channel_blocks, geometry.conv_group_blocks);

  geometry.wgrad_rows = 32;
  geometry.wgrad_group_blocks = std::min(kGroupBlocks, geometry.channel_blocks);
  geometry.wgrad_groups = divide_up(geometry.channel_blocks, geometry.wgrad_group_blocks);
  const int64_t slices =
      std::clamp<int64_t>(geometry.units / (4 * geometry.padded_channels), 1, kMaxSlices);
  geometry.wgrad_slice_units =
      std::max<int64_t>(1, divide_up(divide_up(geometry.units, slices), geometry.wgrad_rows)) * geometry.wgrad_rows;
  geometry.wgrad_slices = std::max<int64_t>(1, divide_up(geometry.units, geometry.wgrad_slice_units));
  return geometry;
}

}  // namespace wnfused::cpu

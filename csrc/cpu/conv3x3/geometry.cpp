// How 3x3 convolutions are cut into panels, chunks, slices and groups; see division.h for the terms.
#include <algorithm>

#include "cpu/conv3x3/geometry.h"

namespace wnfused::cpu {
namespace {

int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

}  // namespace

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
    default:
      return "positions";
  }
}

Geometry make_single_geometry(int64_t images, const Levels& levels, int64_t channels, int64_t outputs, int64_t height,
                              int64_t width, Method method, int64_t workers) {
  Geometry geometry{};
  static_cast<MapShape&>(geometry) = map_shape(images * levels.of_map, channels, height, width);
  geometry.levels = levels.of_map;
  geometry.level_taps = levels.of_kernel;
  geometry.outputs = outputs;
  geometry.output_blocks = divide_up(outputs, kLanes);
  geometry.padded_outputs = geometry.output_blocks * kLanes;
  geometry.method = method;
  geometry.tile = method == Method::kWinograd4 ? 4 : method == Method::kWinograd2 ? 2 : 1;
  geometry.tile_rows = divide_up(height, geometry.tile);
  geometry.tile_cols = divide_up(width, geometry.tile);
  geometry.units = geometry.images * geometry.tile_rows * geometry.tile_cols;
  geometry.planes = geometry.is_winograd() ? (geometry.tile + 2) * (geometry.tile + 2) : kTaps;
  geometry.plane_stride = geometry.gradient_stride = geometry.padded_channels * geometry.padded_outputs + kLanes;

  // Panels of 16 rows stay in the first-level cache while there are few channels; with more of them the bank streams
  // past from the second level, and 32 rows halve that stream.
  const int64_t rows = geometry.channel_blocks <= 1 || geometry.tile == 4 ? 16 : 32;
  // Gathering transforms what it reads.
  constexpr int64_t kStay = 6;
  const Work work{geometry.output_blocks, geometry.bank_size(), geometry.map_size(), geometry.gradient_size(),
                  rows,                   16,                   workers,             kStay};
  divide_convolution(work, [&](int64_t rows) { return divide_up(geometry.units, rows); }, geometry);
  divide_gradient(work, geometry.units, (geometry.tile == 4 ? 2 : 4) * geometry.padded_channels, geometry);
  // Reading panels again from the last level of cache is cheaper than transforming their inputs again for every group.
  constexpr int64_t kKeptFloats = 3 << 19;
  const int64_t panels = divide_up(std::min(geometry.wgrad_slice_units, geometry.units), geometry.wgrad_rows);
  const int64_t floats = panels * geometry.wgrad_rows * geometry.planes * geometry.padded_channels;
  const bool again = geometry.is_winograd() && geometry.level_taps == 1 && geometry.wgrad_groups > workers;
  geometry.wgrad_kept_panels = again && floats <= kKeptFloats ? panels : 0;
  geometry.wgrad_groups *= geometry.level_taps;
  return geometry;
}

void pack_by_groups(Geometry& geometry, int64_t workers) {
  // Floats from which packing a bank in a worker's cache, again for every chunk, is faster than reading it from afar.
  constexpr int64_t kFar = 1 << 19;
  const bool takes_panels = geometry.is_winograd() && geometry.level_taps == 1 && geometry.units > 0;
  const bool wide = geometry.weights_dominate || geometry.bank_size() > kFar;
  if (!takes_panels || !wide || !divide_groups(1, geometry)) return narrow_banks(geometry);
  // A chunk for every worker, if that leaves enough rows for what it costs to pack.
  constexpr int64_t kRows = 48, kLeastRows = 24;
  int64_t chunks = geometry.units <= kMaxPanelRows ? 1 : divide_up(geometry.units, kRows);
  const int64_t even = round_up(chunks, workers);
  if (even * kLeastRows <= geometry.units) chunks = even;
  geometry.conv_rows = round_up(divide_up(geometry.units, chunks), kLanes);
  geometry.conv_chunks = divide_up(geometry.units, geometry.conv_rows);
  geometry.weights_stay = geometry.conv_chunks == 1;
}

Geometry make_geometry(int64_t images, int64_t channels, int64_t height, int64_t width, int64_t blocks, Method method,
                       int64_t workers) {
  Geometry geometry = make_single_geometry(images, {1, 1}, channels, channels, height, width, method, workers);
  geometry.blocks = blocks;
  return geometry;
}

namespace {

// Fewer items than this a phase leave cores idle: cut the output channels too.
constexpr int64_t kEnoughItems = 8;

// Rows of a product of `lines` lines of `width` rows: each line padded to whole register tiles, or the lines with their
// borders, `run` rows each, as one; whichever is shorter. Returns the rows from one line to the next.
int64_t rows_of_line(int64_t lines, int64_t width, int64_t run, const PairTile& tile) {
  const int64_t apart = round_up(width, tile.rows);
  return round_up((lines - 1) * run + width, tile.rows) < lines * apart ? run : apart;
}

constexpr int64_t kChunkPixels = 128;
// Of a chunk of a weight gradient: images, and elements of their inputs, a sixth of the second-level cache.
constexpr int64_t kMaxImages = 8, kInputs = int64_t{1} << 17;

}  // namespace

Geometry make_pair_geometry(int64_t images, int64_t channels, int64_t height, int64_t width, int64_t blocks,
                            const PairTile& tile, int64_t workers) {
  Geometry geometry = make_geometry(images, channels, height, width, blocks, Method::kDirect, workers);
  // Where a bank is so many times as large as a map, each worker packs the weights of its own outputs alone, and reads all
  // of the map.
  constexpr int64_t kStay = 2;
  geometry.weights_dominate =
      geometry.channel_blocks > 1 && kTaps * geometry.padded_channels > kStay * geometry.pixels();
  geometry.weights_stay = workers > 1 && geometry.weights_dominate;
  geometry.wgrad_kept_panels = 0;
  geometry.pair_rows = tile.rows;
  // Products in units of C^2: lines multiply by their padding, positions by missing images of a group, and with fewer
  // rows to a bank they stream more of it.
  const int64_t lines = kTaps * images * height * rows_of_line(height, width, width + 2, tile);
  const int64_t positions = (3 * height - 2) * (3 * width - 2) * round_up(images, tile.rows);
  const bool small = 5 * positions < 4 * lines;
  geometry.method = small ? Method::kPositions : Method::kLines;
  // Two pixels of 16 channels are a cache line.
  geometry.row_pixels = tile.flat && !small && geometry.padded_channels == kLanes ? 2 : 1;

  const int64_t all_groups = divide_up(geometry.channel_blocks, kMaxGroupBlocks);
  const auto divide_conv = [&](int64_t chunks) {
    geometry.conv_chunks = chunks;
    geometry.conv_group_blocks =
        chunks < kEnoughItems ? std::min(kMaxGroupBlocks, geometry.channel_blocks) : geometry.channel_blocks;
    if (geometry.weights_stay)
      geometry.conv_group_blocks = divide_up(geometry.channel_blocks, std::min(workers, geometry.channel_blocks));
    geometry.conv_groups = divide_up(geometry.channel_blocks, geometry.conv_group_blocks);
    choose_banks(geometry.channel_blocks, workers, geometry);
  };
  const auto divide_wgrad = [&](int64_t chunks, int64_t pixels) {
    const int64_t slices = std::clamp<int64_t>(pixels / (4 * geometry.padded_channels), 1, kMaxSlices);
    geometry.wgrad_chunks = chunks;
    geometry.wgrad_slice_chunks = std::max<int64_t>(1, divide_up(chunks, slices));
    geometry.wgrad_slices = std::max<int64_t>(1, divide_up(chunks, geometry.wgrad_slice_chunks));
  };

  if (small) {
    geometry.segments = kTaps;
    geometry.segment_depth = round_up(geometry.padded_channels, tile.depth);
    geometry.conv_rows = 2 * tile.rows;
    while (geometry.conv_rows > tile.rows && !geometry.weights_stay &&
           divide_up(images, geometry.conv_rows) * all_groups < kEnoughItems)
      geometry.conv_rows /= 2;
    divide_conv(divide_up(images, geometry.conv_rows));
    geometry.wgrad_rows = round_up(std::clamp<int64_t>(images, 1, 32), tile.depth);
    geometry.wgrad_depth = geometry.wgrad_plane = geometry.wgrad_rows;
    geometry.wgrad_run = height * width * geometry.wgrad_rows;
    divide_wgrad(divide_up(images, geometry.wgrad_rows), geometry.pixels());
    return geometry;
  }

  geometry.segments = 3;
  geometry.segment_depth = round_up((geometry.row_pixels + 2) * geometry.padded_channels, tile.depth);
  geometry.conv_lines = std::clamp<int64_t>(kChunkPixels / width, 1, height);
  while (geometry.conv_lines > 1 && !geometry.weights_stay &&
         images * divide_up(height, geometry.conv_lines) * all_groups < kEnoughItems)
    geometry.conv_lines = divide_up(geometry.conv_lines, 2);
  const int64_t line_rows = divide_up(width, geometry.row_pixels);
  geometry.conv_line_pixels = round_up(width + 2, geometry.row_pixels);
  geometry.conv_line_rows =
      rows_of_line(geometry.conv_lines, line_rows, geometry.conv_line_pixels / geometry.row_pixels, tile);
  geometry.conv_rows = round_up((geometry.conv_lines - 1) * geometry.conv_line_rows + line_rows, tile.rows);
  divide_conv(images * divide_up(height, geometry.conv_lines));

  geometry.wgrad_lines = std::clamp<int64_t>(2 * kChunkPixels / width, 1, height);
  geometry.wgrad_line_pixels = round_up(width + 2, 2);
  const int64_t run = geometry.wgrad_lines * geometry.wgrad_line_pixels;
  geometry.wgrad_depth = tile.flat ? round_up(run, tile.depth) : round_up(width, 2);
  geometry.wgrad_run = tile.flat ? geometry.wgrad_depth : run;
  // The last tap is two lines and two pixels further on. Channels lie an odd number of cache lines apart, so that they do
  // not share sets.
  constexpr int64_t kLine = 32;
  const int64_t reach = geometry.wgrad_run + 2 * geometry.wgrad_line_pixels + 2;
  geometry.wgrad_turned = tile.flat;
  geometry.wgrad_span = round_up(reach, 2);
  const bool whole = geometry.wgrad_turned && geometry.wgrad_lines == height;
  const int64_t fit = kInputs / (geometry.padded_channels * geometry.wgrad_span);
  const int64_t few = std::min(2 * kChunkPixels / (height * width), fit);
  geometry.wgrad_images = whole ? std::clamp<int64_t>(few, 1, kMaxImages) : 1;
  const int64_t plane = geometry.wgrad_turned ? geometry.wgrad_images * geometry.wgrad_depth : reach;
  geometry.wgrad_plane = round_up(plane, 2 * kLine) + kLine;
  divide_wgrad(divide_up(images, geometry.wgrad_images) * divide_up(height, geometry.wgrad_lines), geometry.pixels());
  return geometry;
}

}  // namespace wnfused::cpu

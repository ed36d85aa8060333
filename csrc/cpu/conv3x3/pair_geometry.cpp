// How 3x3 convolutions on pairs of bfloat16 are cut up (pair_conv.h, pair_wgrad.h).
#include <algorithm>

#include "cpu/conv3x3/geometry.h"

namespace wnfused::cpu {
namespace {

// Fewer items than this a phase leave cores idle: cut the output channels too.
constexpr int64_t kEnoughItems = 8;

constexpr int64_t kChunkPixels = 128;
// Of a chunk whose products are tiles, which wait for what is not in the first-level cache: its panel, the bank or a
// part of it, and what the epilogue reads and writes are to fit. At least so many pixels, so that the bank is read for
// enough rows.
constexpr int64_t kTileChunk = 2048, kTileChunkPixels = 64;
// Of a chunk of a weight gradient: images, and elements of their inputs, an eighth of the second-level cache.
constexpr int64_t kGradientImages = 8, kInputs = int64_t{1} << 17;

// Rows of a product of `lines` lines of `width` rows: each line padded to whole register tiles, or the lines with their
// borders, `run` rows each, as one; whichever is shorter. Returns the rows from one line to the next.
int64_t rows_of_line(int64_t lines, int64_t width, int64_t run, const PairTile& tile) {
  const int64_t apart = round_up(width, tile.rows);
  return round_up((lines - 1) * run + width, tile.rows) < lines * apart ? run : apart;
}

int64_t pixels_inside(const MapShape& shape) { return (3 * shape.height - 2) * (3 * shape.width - 2); }  // of all taps

// The panel and the products of chunks of at most `most` lines.
void lay_out_lines(int64_t most, const PairTile& tile, Geometry& geometry) {
  geometry.method = Method::kLines;
  geometry.segments = 3;
  // Two pixels of 16 channels are a cache line.
  geometry.row_pixels = tile.is_matrix && geometry.padded_channels == kLanes && geometry.width % 2 == 0 ? 2 : 1;
  geometry.segment_depth = round_up((geometry.row_pixels + 2) * geometry.padded_channels, tile.depth);
  geometry.conv_lines = most;
  geometry.conv_line_pixels = round_up(geometry.width + 2, geometry.row_pixels);
  const int64_t width = divide_up(geometry.width, geometry.row_pixels);
  const int64_t line = rows_of_line(most, width, geometry.conv_line_pixels / geometry.row_pixels, tile);
  geometry.conv_line_rows = line;
  geometry.conv_rows = round_up((most - 1) * line + width, tile.rows);
  geometry.conv_chunks = geometry.images * divide_up(geometry.height, most);
}

void lay_out_positions(int64_t rows, const PairTile& tile, Geometry& geometry) {
  geometry.method = Method::kPositions;
  geometry.segments = kTaps;
  geometry.row_pixels = 1;
  geometry.segment_depth = round_up(geometry.padded_channels, tile.depth);
  geometry.conv_rows = rows;
  geometry.conv_chunks = divide_up(geometry.images, rows);
}

// Whether positions take less time than `lines`, which are laid out. Lines multiply by their padding, positions by
// missing images of a group; positions also stream more of the bank, for fewer rows, and of a panel that is whole
// images, so that one of their tiles takes twice as long (bench/NOTES.md).
bool positions_are_faster(const PairTile& tile, const Geometry& lines) {
  const int64_t positions = pixels_inside(lines) * round_up(lines.images, tile.rows);
  if (tile.is_matrix) {
    const int64_t rows = lines.conv_chunks * lines.conv_rows * lines.row_pixels;
    return 2 * positions * round_up(lines.padded_channels, tile.depth) < rows * lines.segments * lines.segment_depth;
  }
  const int64_t line = rows_of_line(lines.height, lines.width, lines.width + 2, tile);
  return 5 * positions < 4 * kTaps * lines.images * lines.height * line;
}

void divide_pair_convolution(const PairTile& tile, int64_t workers, Geometry& geometry) {
  const int64_t groups = divide_up(geometry.channel_blocks, kMaxBundleBlocks);
  const auto enough = [&] { return geometry.weights_stay || geometry.conv_chunks * groups >= kEnoughItems; };
  const int64_t pixels =
      tile.is_matrix ? std::max(kTileChunk / geometry.padded_channels, kTileChunkPixels) : kChunkPixels;
  lay_out_lines(std::clamp<int64_t>(pixels / geometry.width, 1, geometry.height), tile, geometry);
  if (positions_are_faster(tile, geometry)) {
    lay_out_positions(2 * tile.rows, tile, geometry);
    if (!enough()) lay_out_positions(tile.rows, tile, geometry);
  } else {
    while (geometry.conv_lines > 1 && !enough()) lay_out_lines(divide_up(geometry.conv_lines, 2), tile, geometry);
  }
  geometry.conv_bundle_blocks = geometry.channel_blocks;
  if (geometry.weights_stay)
    geometry.conv_bundle_blocks = divide_up(geometry.channel_blocks, std::min(workers, geometry.channel_blocks));
  else if (geometry.conv_chunks < kEnoughItems)
    geometry.conv_bundle_blocks = std::min(kMaxBundleBlocks, geometry.channel_blocks);
  geometry.conv_bundles = divide_up(geometry.channel_blocks, geometry.conv_bundle_blocks);
  choose_banks(geometry.channel_blocks, workers, geometry);
  geometry.narrow_banks = geometry.weights_stay;
  geometry.bank_blocks = geometry.narrow_banks ? geometry.conv_bundle_blocks : geometry.channel_blocks;
}

void lay_out_gradient_positions(const PairTile& tile, Geometry& geometry) {
  geometry.wgrad_rows = round_up(std::clamp<int64_t>(geometry.images, 1, 32), tile.depth);
  geometry.wgrad_depth = geometry.wgrad_plane = geometry.wgrad_rows;
  geometry.wgrad_run = geometry.height * geometry.width * geometry.wgrad_rows;
  geometry.wgrad_chunks = divide_up(geometry.images, geometry.wgrad_rows);
}

void lay_out_gradient_lines(const PairTile& tile, Geometry& geometry) {
  const int64_t height = geometry.height, width = geometry.width;
  geometry.wgrad_turned = tile.is_matrix;
  geometry.wgrad_by_images = tile.is_matrix && geometry.images > 1;
  const int64_t together = geometry.wgrad_by_images ? 2 : 1;
  const int64_t pixels = (tile.is_matrix && geometry.channel_blocks == 1 ? 4 : 2) * kChunkPixels;
  geometry.wgrad_lines = std::clamp<int64_t>(pixels / (together * width), 1, height);
  geometry.wgrad_line_pixels = geometry.wgrad_by_images ? 2 * (width + 2) : round_up(width + 2, 2);
  const int64_t run = geometry.wgrad_lines * geometry.wgrad_line_pixels;
  geometry.wgrad_depth = tile.is_matrix ? round_up(run, tile.depth) : round_up(width, 2);
  geometry.wgrad_run = tile.is_matrix ? geometry.wgrad_depth : run;
  // The last tap is two lines and two pixels further on. Channels lie an odd number of cache lines apart, so that they
  // do not share sets.
  constexpr int64_t kLine = 32;
  const int64_t reach = geometry.wgrad_run + 2 * geometry.wgrad_line_pixels + 2 * together;
  geometry.wgrad_span = round_up(reach, 2);
  const bool whole = geometry.wgrad_turned && geometry.wgrad_lines == height;
  const int64_t fit = kInputs / (geometry.padded_channels * geometry.wgrad_span);
  const int64_t few = std::min(2 * kChunkPixels / (height * width), fit);
  const int64_t most = std::clamp(round_up(geometry.images, together), together, kGradientImages);
  geometry.wgrad_images = whole ? std::clamp<int64_t>(few / together * together, together, most) : together;
  const int64_t plane = geometry.wgrad_turned ? geometry.wgrad_segments() * geometry.wgrad_depth : reach;
  geometry.wgrad_plane = round_up(plane, 2 * kLine) + kLine;
  geometry.wgrad_chunks = divide_up(geometry.images, geometry.wgrad_images) * divide_up(height, geometry.wgrad_lines);
}

void divide_pair_gradient(const PairTile& tile, int64_t workers, Geometry& geometry) {
  geometry.wgrad_panels = 0;
  geometry.wgrad_keeps = false;
  geometry.wgrad_positions = geometry.method == Method::kPositions;
  lay_out_gradient_positions(tile, geometry);
  if (tile.is_matrix) {
    // The depth runs over images, of which there are to be enough. A panel of all pixels comes from the second-level
    // cache, which a single block of inputs and outputs is too little work for.
    const int64_t most = geometry.channel_blocks > 1 ? 4 * kInputs : kInputs;
    const int64_t panel = geometry.padded_channels * geometry.wgrad_run;
    const int64_t positions = pixels_inside(geometry) * geometry.wgrad_chunks * geometry.wgrad_rows;
    const int64_t lines = kTaps * geometry.images * round_up(geometry.height * (geometry.width + 2), tile.depth);
    geometry.wgrad_positions = panel <= most && 10 * positions < 11 * lines;
  }
  if (!geometry.wgrad_positions) lay_out_gradient_lines(tile, geometry);
  const int64_t most = affordable_slices(geometry.gradient_size());
  const int64_t slices = std::clamp<int64_t>(geometry.pixels() / (4 * geometry.padded_channels), 1, most);
  geometry.wgrad_slice_chunks = std::max<int64_t>(1, divide_up(geometry.wgrad_chunks, slices));
  geometry.wgrad_slices = std::max<int64_t>(1, divide_up(geometry.wgrad_chunks, geometry.wgrad_slice_chunks));
  divide_gradient_outputs(geometry.channel_blocks, workers, geometry);
}

}  // namespace

Geometry make_pair_geometry(int64_t images, int64_t channels, int64_t height, int64_t width, int64_t blocks,
                            const PairTile& tile, int64_t workers) {
  Geometry geometry = make_geometry(images, channels, height, width, blocks, Method::kDirect, workers);
  // Where a bank is so many times as large as a map, each worker packs the weights of its own outputs alone, and reads
  // all of the map.
  constexpr int64_t kStay = 2;
  geometry.weights_dominate =
      geometry.channel_blocks > 1 && kTaps * geometry.padded_channels > kStay * geometry.pixels();
  geometry.weights_stay = workers > 1 && geometry.weights_dominate;
  geometry.pair_rows = tile.rows;
  geometry.pair_tiles = tile.is_matrix;
  divide_pair_convolution(tile, workers, geometry);
  divide_pair_gradient(tile, workers, geometry);
  return geometry;
}

}  // namespace wnfused::cpu

#include "cpu/pair_window/pair_window.h"

#include <algorithm>
#include <vector>

namespace wnfused::cpu {
namespace {

// Elements of the inputs of a chunk, and its pixels at least (bench/NOTES.md); of a weight gradient's chunk.
constexpr int64_t kChunk = 2048, kChunkPixels = 64, kGradientPixels = 512;
constexpr int64_t kItemsEach = 4;                     // of a worker's
constexpr int64_t kGradients = int64_t{1} << 25;      // floats of all slices of a weight gradient
// Floats of a bank, half of the second-level cache, which is 2 MB beside tiles and 1 MB beside dot products: more
// output blocks are packed bundle by bundle, each over the last.
constexpr int64_t kTileBank = int64_t{1} << 18, kDotBank = int64_t{1} << 17;

// The taps of a grid as segments: runs of equal length, or every tap by itself.
void join_taps(const Window& window, const Grid& from, int64_t first_segment, PairWindow& pairs, PairGrid& grid) {
  std::vector<Tap> taps(window.taps + from.first_tap, window.taps + from.first_tap + from.taps);
  std::sort(taps.begin(), taps.end(),
            [](const Tap& a, const Tap& b) { return a.row != b.row ? a.row < b.row : a.column < b.column; });
  grid.first_segment = first_segment;
  grid.segments = grid.reach_rows = grid.reach_columns = grid.run = 0;
  if (taps.empty()) return;
  const auto [left, right] = std::minmax_element(taps.begin(), taps.end(),
                                                 [](const Tap& a, const Tap& b) { return a.column < b.column; });
  grid.source_row = taps.front().row;
  grid.source_column = left->column;
  grid.reach_rows = taps.back().row - taps.front().row + 1;
  grid.reach_columns = right->column - left->column + 1;
  const size_t run = static_cast<size_t>(grid.reach_columns);
  bool joined = taps.size() % run == 0;
  for (size_t i = 0; joined && i < taps.size(); ++i) {
    const Tap& first = taps[i / run * run];
    joined = taps[i].row == first.row && taps[i].column == first.column + static_cast<int64_t>(i % run);
  }
  grid.run = joined ? grid.reach_columns : 1;
  for (size_t i = 0; i < taps.size(); i += static_cast<size_t>(grid.run)) {
    const int64_t step = grid.run > 1 ? taps[i + 1].plane - taps[i].plane : 0;
    pairs.segments[first_segment + grid.segments++] = {taps[i].row - grid.source_row,
                                                       taps[i].column - grid.source_column, taps[i].plane, step};
  }
}

// Columns of a chunk of about so many pixels.
int64_t columns_of(int64_t width, int64_t pixels) { return width > 2 * pixels ? pixels : width; }

// Chunks of about so many pixels.
void lay_out_grid(const PairWindow& pairs, int64_t pixels, PairGrid& grid) {
  const int64_t step = grid.panel_step;
  const int64_t columns = grid.columns = columns_of(grid.width, round_up(pixels, pairs.tile_rows));
  const int64_t lines = grid.lines = std::clamp<int64_t>(pixels / columns, 1, grid.height);
  grid.row_chunks = divide_up(grid.height, lines);
  grid.column_chunks = divide_up(grid.width, columns);
  grid.residue_lines = lines + (std::max<int64_t>(grid.reach_rows, 1) - 1) / pairs.row_step;
  grid.line_pixels = round_up((columns - 1) * step + std::max<int64_t>(grid.reach_columns, 1), step);
  // Lines one after the other with what lies between them, or each padded to whole tiles; whichever is shorter.
  const int64_t apart = round_up(columns, pairs.tile_rows), run = grid.line_pixels / step;
  const int64_t rows = std::min(round_up((lines - 1) * run + columns, pairs.tile_rows), lines * apart);
  grid.line_rows = rows < lines * apart ? run : apart;
  // Or the pixels alone, where the products can; of several small images, if the target's lines run on from each to the
  // next one.
  const bool whole = grid.row_chunks * grid.column_chunks == 1;
  const bool runs_on = grid.height * pairs.target_row_step == pairs.target.height;
  grid.images = 1;
  if (whole && runs_on && (pairs.scatters || pairs.thin))
    grid.images = std::clamp<int64_t>(pixels / (lines * columns), 1, pairs.source.images);
  const bool dense = grid.images > 1 || round_up(lines * columns, pairs.tile_rows) < rows;
  grid.scattered = pairs.scatters && !pairs.thin && dense;
  if (pairs.thin || grid.scattered) grid.line_rows = columns;
}

// Of a chunk, at least.
int64_t chunk_pixels(const PairWindow& pairs) { return std::max(kChunk / pairs.pixel, kChunkPixels); }

// Room for the panel of a grid's chunk.
void reserve_panel(const PairGrid& grid, PairWindow& pairs) {
  const int64_t pixel = pairs.thin ? pairs.source.channels : pairs.pixel;
  const int64_t lines = (pairs.thin ? 1 : grid.images) * grid.image_elements(pairs.row_step, pixel);
  const int64_t rows = grid.images * grid.lines * grid.columns * grid.depth;
  // A tile reads rows behind the last one, and what is copied ends with a whole vector.
  const int64_t row = pairs.thin ? grid.depth : grid.panel_step * pairs.pixel;
  const int64_t slack = pairs.tile_rows * row + grid.depth + 2 * kLanes;
  pairs.panel = std::max(pairs.panel, (pairs.thin ? rows : lines) + slack);
  if (pairs.thin) pairs.lines_before_rows = std::max(pairs.lines_before_rows, lines + slack);
}

void divide(int64_t workers, PairWindow& pairs) {
  const int64_t blocks = pairs.output_blocks, bank = pairs.bank_size(), map = pairs.source.map_size();
  constexpr int64_t kStay = 2;
  const int64_t cached = pairs.scatters ? kDotBank : kTileBank;
  pairs.weights_dominate = blocks > 1 && bank > kStay * map;
  pairs.weights_stay = (workers > 1 && pairs.weights_dominate) || bank > cached;
  pairs.conv_bundle_blocks = blocks;
  if (pairs.weights_stay) {
    const int64_t fit = std::max<int64_t>(cached / std::max<int64_t>(pairs.block_floats(), 1), 1);
    pairs.conv_bundle_blocks = std::min(divide_up(blocks, std::min(workers, blocks)), fit);
  }
  const auto count = [&] {
    pairs.conv_chunks = 0;
    for (int64_t i = 0; i < pairs.grid_count; ++i) {
      pairs.grids[i].first_chunk = pairs.conv_chunks;
      if (pairs.grids[i].height > 0 && pairs.grids[i].width > 0)
        pairs.conv_chunks += divide_up(pairs.source.images, pairs.grids[i].images) * pairs.grids[i].image_chunks();
    }
  };
  for (int64_t pixels = chunk_pixels(pairs);; pixels /= 2) {
    bool divisible = false;
    for (int64_t i = 0; i < pairs.grid_count; ++i) {
      PairGrid& grid = pairs.grids[i];
      if (grid.height == 0 || grid.width == 0) continue;
      lay_out_grid(pairs, pixels, grid);
      divisible = divisible || grid.images > 1 || grid.lines > 1 || (grid.width >= pixels && pixels > pairs.tile_rows);
    }
    count();
    if (!divisible || pairs.weights_stay || pairs.conv_chunks >= kItemsEach * workers) break;
  }
  if (pairs.conv_chunks < workers && !pairs.weights_stay)
    pairs.conv_bundle_blocks = std::min(kMaxBundleBlocks, pairs.output_blocks);
  pairs.conv_bundles = divide_up(pairs.output_blocks, pairs.conv_bundle_blocks);
  choose_banks(pairs.output_blocks, workers, pairs);
  pairs.narrow_banks = pairs.weights_stay;

  for (int64_t i = 0; i < pairs.grid_count; ++i) reserve_panel(pairs.grids[i], pairs);
}

void divide_weight_gradient(int64_t workers, PairWindow& pairs) {
  PairGrid& grid = pairs.wgrad_grid;
  grid = pairs.grids[0];
  // A thin source's taps are no shifts but entries of its rows, gathered as for the convolution; but its chunks, and so
  // the order of the sums, are those of any number of workers.
  const bool thin = pairs.thin;
  if (thin && grid.height > 0 && grid.width > 0) {
    lay_out_grid(pairs, chunk_pixels(pairs), grid);
    reserve_panel(grid, pairs);
  }
  const int64_t row_shift = thin ? 0 : (grid.reach_rows - 1) / pairs.row_step;
  const int64_t column_shift = thin ? 0 : (grid.reach_columns - 1) / pairs.column_step;
  pairs.wgrad_columns = thin ? grid.columns : columns_of(grid.width, kGradientPixels);
  pairs.wgrad_lines = thin ? grid.lines : std::clamp<int64_t>(kGradientPixels / pairs.wgrad_columns, 1, grid.height);
  pairs.wgrad_line_pixels = thin ? grid.columns : round_up(pairs.wgrad_columns + column_shift, 2);
  pairs.wgrad_row_chunks = divide_up(grid.height, pairs.wgrad_lines);
  pairs.wgrad_column_chunks = divide_up(grid.width, pairs.wgrad_columns);
  const int64_t image_run = round_up(pairs.wgrad_lines * pairs.wgrad_line_pixels, pairs.tile_depth);
  const int64_t images = std::clamp<int64_t>(std::min(kGradientPixels / image_run, kMaxImages), 1, pairs.source.images);
  const bool whole = pairs.wgrad_row_chunks * pairs.wgrad_column_chunks == 1;
  pairs.wgrad_images = thin ? grid.images : whole ? images : 1;
  pairs.wgrad_taps = thin ? 1 : pairs.row_taps;
  pairs.wgrad_input_blocks = thin ? divide_up(pairs.row_floats(), kLanes) : pairs.source.channel_blocks;
  const int64_t run_images = thin ? grid.images : 1;
  pairs.wgrad_run = round_up(run_images * pairs.wgrad_lines * pairs.wgrad_line_pixels, pairs.tile_depth);
  constexpr int64_t kLine = 32;
  pairs.wgrad_plane = round_up(pairs.wgrad_segments(pairs.wgrad_images) * pairs.wgrad_run, 2 * kLine) + kLine;
  pairs.wgrad_chunks = divide_up(pairs.source.images, pairs.wgrad_images) * pairs.wgrad_row_chunks *
                       pairs.wgrad_column_chunks;
  pairs.wgrad_shifts = column_shift > 0 ? 2 : 1;
  pairs.wgrad_span = round_up(pairs.wgrad_run + row_shift * pairs.wgrad_line_pixels + column_shift + 1, 2);
  const int64_t pixels = pairs.target.pixels();
  const int64_t most = std::clamp<int64_t>(kGradients / pairs.gradient_size(), 1, kMaxSlices);
  const int64_t slices = std::clamp<int64_t>(pixels / (4 * pairs.wgrad_input_blocks * kLanes), 1, most);
  pairs.wgrad_slice_chunks = std::max<int64_t>(1, divide_up(pairs.wgrad_chunks, slices));
  pairs.wgrad_slices = std::max<int64_t>(1, divide_up(pairs.wgrad_chunks, pairs.wgrad_slice_chunks));
  int64_t groups = divide_up(pairs.output_blocks, kMaxGroups / pairs.block_groups());
  while (pairs.wgrad_slices * groups < workers && groups < pairs.output_blocks) ++groups;
  pairs.wgrad_bundle_blocks = divide_up(pairs.output_blocks, groups);
  pairs.wgrad_bundles = divide_up(pairs.output_blocks, pairs.wgrad_bundle_blocks);
}

}  // namespace

bool suits_pair_window(const ConvShape& shape) {
  return shape.is_sound() && shape.fits_window() && shape.groups == 1 && shape.has_one_level();
}

PairWindow make_pair_window(const ConvShape& shape, bool back, const PairTile& tile, int64_t workers) {
  const Window window = back ? backward_window(shape, workers) : forward_window(shape, false, workers);
  PairWindow pairs{};
  pairs.source = window.source;
  pairs.target = window.target;
  pairs.row_step = window.source_step.row;
  pairs.column_step = window.source_step.column;
  pairs.target_row_step = window.target_step.row;
  pairs.target_column_step = window.target_step.column;
  pairs.tile_rows = tile.rows;
  pairs.tile_depth = tile.depth;
  pairs.row_taps = shape.taps();
  pairs.thin = window.source.channels < kThin;
  pairs.scatters = !tile.is_matrix;
  pairs.output_blocks = window.output_blocks;
  pairs.padded_outputs = window.padded_outputs;
  pairs.grid_count = window.grid_count;
  int64_t first_segment = 0, elements = 0;
  bool steps = true;  // each row of a product begins an even number of pixels after the one before
  for (int64_t i = 0; i < pairs.grid_count; ++i) {
    PairGrid& grid = pairs.grids[i];
    const Grid& from = window.grids[i];
    grid.row = from.origin.row;
    grid.column = from.origin.column;
    grid.height = from.size.row;
    grid.width = from.size.column;
    join_taps(window, from, first_segment, pairs, grid);
    first_segment += grid.segments;
    // Pixels that no tap meets are left out.
    grid.panel_step = grid.reach_columns > 1 ? pairs.column_step : 1;
    steps = steps && (grid.segments == 0 || grid.panel_step % 2 == 0);
  }
  // Tiles load rows that begin cache lines, of 32 elements.
  const int64_t unit = steps ? kLanes : std::max<int64_t>(kLanes, tile.depth);
  pairs.pixel = round_up(window.source.channels, unit);
  for (int64_t i = 0; i < pairs.grid_count; ++i) {
    PairGrid& grid = pairs.grids[i];
    const int64_t segment = grid.run * (pairs.thin ? pairs.source.channels : pairs.pixel);
    grid.depth = round_up(pairs.thin ? grid.segments * segment : segment, tile.depth);
    grid.bank = elements;
    elements += (pairs.thin ? std::min<int64_t>(grid.segments, 1) : grid.segments) * grid.depth * kLanes;
  }
  pairs.block_elements = elements;
  divide(workers, pairs);
  if (!back) divide_weight_gradient(workers, pairs);
  return pairs;
}

int64_t operand_floats(const MapShape& map) { return (map.pixels() * map.channels + 1) / 2; }

int64_t worker_floats(const PairWindow& pairs) {
  const int64_t row = round_up(pairs.row_floats(), kLanes);
  const int64_t packing = kLanes * pairs.row_taps * kLanes + 2 * kLanes;
  const int64_t finishing = kFinishRows * row + kLanes;
  const int64_t masking = kMapPixels * (pairs.target.padded_channels + pairs.source.padded_channels);
  return std::max({pairs.conv_scratch(), pairs.wgrad_scratch(), packing, finishing, masking}) + 2 * kLanes;
}

}  // namespace wnfused::cpu

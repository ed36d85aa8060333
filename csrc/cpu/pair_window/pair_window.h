// A convolution over any window of one level, on pairs of bfloat16 (pairs.h): of layers whose maps are bfloat16.
//
// Grids, taps and steps are Window's (window.h), for the way to y and for the data gradient. What differs is how the
// products read the source: a chunk is some lines of a grid, or whole images, and its panel a copy of the source's
// lines that it meets, with the zeros of the padding. Taps side by side read one run of a line, so a segment of the
// depth is a row of the kernel:
//
//   panel [line][pixel][Cp]      row of pixel x: from panel pixel x step on, the run of `run` Cp elements
//
// Lines that lie a stride apart are neighbours in the panel, and so are those of the next residue, so that neighbouring
// lines of the target are a line of the panel apart. A tile is slow to load unless its rows begin cache lines, which
// decides Cp. A source of few channels ("thin") has its runs copied once more, to whole rows:
//
//   panel [pixel][depth]         all taps of all channels side by side
//
//   map       [N, H, W, C] bfloat16, no padding: a channels_last tensor is read and written where it is
//   bank      [output block][grid][segment][depth / 2][16 lanes][2]
//
// The weight gradient's depth runs over pixels, so its panels are turned:
//
//   outputs   [O][image][lines][pixels]                        dz; zero beyond the map
//   inputs    [image][residue][input block][shift][pixel / 2][16][2]  x; a tap is a shift of the run, by an odd number
//                                                                     in a copy
//   sums      [tap][input block][Op][16]                       of a slice
//
// Of a thin source its whole rows are turned, so that all taps are one product:
//
//   inputs    [depth / 16][pixel / 2][16][2]     sums   [depth / 16][Op][16]
#pragma once

#include <cstdint>

#include "cpu/conv/division.h"
#include "cpu/products/pair_shape.h"
#include "cpu/window/window.h"

namespace wnfused::cpu {

constexpr int64_t kMaxImages = 64;  // of a weight gradient's chunk

// Taps of the kernel side by side: where they meet the source, from what the grid's first pixel meets first.
struct PairSegment {
  int64_t row, column;
  int64_t first_plane, plane_step;
};

struct PairGrid {
  int64_t row, column;                // of its first pixel, in the target
  int64_t height, width;              // pixels
  int64_t source_row, source_column;  // of what that pixel meets first; in the padding, perhaps
  int64_t reach_rows, reach_columns;  // lines and pixels of the source that a pixel meets
  int64_t first_segment, segments, run, depth;
  int64_t images, lines, columns;         // of a chunk; a single line may be cut, too
  bool scattered;                         // its rows are its pixels alone, wherever they lie
  int64_t line_pixels, line_rows;         // of a line of its panel, and of the product
  int64_t residue_lines;                  // of the panel, that lie a stride apart
  int64_t panel_step;                     // pixels of the panel from one of the grid to the next
  int64_t first_chunk, row_chunks, column_chunks;
  int64_t bank;  // elements of an output block before this grid's

  int64_t image_chunks() const { return row_chunks * column_chunks; }
  int64_t line_elements(int64_t pixel) const { return line_pixels * pixel; }
  // Of the panel, where lines lie `step` apart in the source.
  int64_t image_elements(int64_t step, int64_t pixel) const {
    return std::min(step, reach_rows) * residue_lines * line_elements(pixel);
  }
};

// Lines and columns that a chunk is, of one image or, all of them, of several.
struct PairChunk {
  int64_t image, images, line, lines, column, columns;
};

struct PairWindow : Division {
  MapShape source, target;
  int64_t row_step, column_step;                // in the source
  int64_t target_row_step, target_column_step;  // in the target
  bool thin;
  bool scatters;  // whether products can (pairs.h): dot products, not tiles
  int64_t pixel;  // elements of one in a panel
  int64_t tile_rows, tile_depth;
  int64_t row_taps;  // of the kernel
  int64_t grid_count;
  PairGrid grids[kMaxGrids];
  PairGrid wgrad_grid;  // the first one, divided for the weight gradient
  PairSegment segments[kMaxWindowTaps];
  int64_t output_blocks, padded_outputs;
  int64_t block_elements;  // of the bank
  int64_t panel, lines_before_rows;  // elements of the largest panel; thin: of its lines

  // The weight gradient: images, lines and columns of a chunk, pixels of a line, and of a run, a multiple of the tiles'
  // depth; chunks in all, of an image and of a slice.
  int64_t wgrad_images, wgrad_lines, wgrad_columns, wgrad_line_pixels, wgrad_run;
  int64_t wgrad_chunks, wgrad_row_chunks, wgrad_column_chunks, wgrad_slice_chunks;
  int64_t wgrad_plane;  // elements of an output: an odd number of cache lines, so that outputs do not share sets
  int64_t wgrad_shifts, wgrad_span;  // the inputs' panels of a block, and pixels of one
  int64_t wgrad_taps, wgrad_input_blocks;  // products of a chunk and their blocks; thin: one, of whole rows

  int64_t block_groups() const { return kLanes / tile_rows; }  // register tiles of rows in a block
  // Where each worker packs the blocks of its bundle for itself, a bank has room for those alone.
  int64_t bank_size() const { return (narrow_banks ? conv_bundle_blocks : output_blocks) * block_floats(); }
  int64_t block_floats() const { return block_elements / 2; }
  int64_t row_floats() const { return source.channels * row_taps; }
  const PairGrid& grid_of(int64_t chunk) const {
    int64_t i = grid_count - 1;
    while (chunk < grids[i].first_chunk) --i;
    return grids[i];
  }
  // A chunk of the convolution, counted from the grid's first, and of the weight gradient.
  PairChunk conv_chunk(const PairGrid& grid, int64_t chunk) const {
    return chunk_of(grid, chunk, grid.images, grid.row_chunks, grid.column_chunks, grid.lines, grid.columns);
  }
  PairChunk wgrad_chunk(int64_t chunk) const {
    return chunk_of(wgrad_grid, chunk, wgrad_images, wgrad_row_chunks, wgrad_column_chunks, wgrad_lines, wgrad_columns);
  }
  int64_t tap_sums() const { return wgrad_input_blocks * kLanes * padded_outputs; }
  int64_t gradient_size() const { return wgrad_taps * tap_sums(); }
  int64_t row_residues() const { return std::min(row_step, grids[0].reach_rows); }
  int64_t column_residues() const { return std::min(column_step, grids[0].reach_columns); }
  int64_t wgrad_residues() const { return thin ? 1 : row_residues() * column_residues(); }
  // Of the inputs' panels, an image's and all.
  int64_t wgrad_image_inputs() const {
    return wgrad_residues() * wgrad_input_blocks * wgrad_shifts * wgrad_span * kLanes;
  }
  int64_t wgrad_inputs() const { return wgrad_segments(wgrad_images) * wgrad_image_inputs(); }
  // Runs of the depth for so many images: rows of a thin source are one.
  int64_t wgrad_segments(int64_t images) const { return thin ? 1 : images; }
  int64_t wgrad_outputs() const { return wgrad_bundle_blocks * kLanes * wgrad_plane + kLanes; }
  // Where a worker's scratch has the parts of a convolution (the panel, a thin source's lines, sums) and of the weight
  // gradient (inputs, outputs, what turns them: a line, or a thin source's panel and lines), in floats, and where they
  // end.
  int64_t lines_at() const { return panel_floats(panel); }
  int64_t sums_at() const { return lines_at() + panel_floats(lines_before_rows); }
  int64_t conv_scratch() const { return sums_at() + kTileSums; }
  int64_t wgrad_outputs_at() const { return panel_floats(wgrad_inputs()); }
  int64_t wgrad_rows_at() const { return wgrad_outputs_at() + panel_floats(wgrad_outputs()); }
  int64_t wgrad_scratch() const { return wgrad_rows_at() + (thin ? sums_at() : panel_floats(wgrad_line())); }
  int64_t wgrad_line() const { return (wgrad_line_pixels * column_step + 2) * source.padded_channels; }

 private:
  // So many images at once are cut into `rows` x `columns` chunks of at most `lines` x `width`.
  PairChunk chunk_of(const PairGrid& grid, int64_t chunk, int64_t images, int64_t rows, int64_t columns, int64_t lines,
                     int64_t width) const {
    const int64_t image = chunk / columns / rows * images;
    const int64_t line = chunk / columns % rows * lines, column = chunk % columns * width;
    const int64_t lines_left = grid.height - line, columns_left = grid.width - column;
    return {image, std::min(images, source.images - image), line, std::min(lines, lines_left), column,
            std::min(width, columns_left)};
  }
};

// Whether a layer is one of these at all.
bool suits_pair_window(const ConvShape& shape);

// From x's map to y's, or back.
PairWindow make_pair_window(const ConvShape& shape, bool back, const PairTile& tile, int64_t workers);

// Floats that a worker needs.
int64_t worker_floats(const PairWindow& window);
inline int64_t zeros_floats(const PairWindow&) { return 0; }
// Floats that hold a map.
int64_t operand_floats(const MapShape& map);

}  // namespace wnfused::cpu

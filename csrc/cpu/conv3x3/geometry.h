// How 3x3 convolutions of stride 1 and zero padding 1, a stage's or a layer's, are cut into panels, chunks, slices and
// groups.
//
// Four methods compute one, all as matrix products of a gathered panel with a bank. Two multiply floats (see
// conv.h), two pairs of bfloat16 (see pairs.h), where the processor has an instruction for it:
//   direct     9 planes, one row a pixel         9 C multiply-adds a pixel, exact zero padding: maps under 4x4
//   winograd   16 planes, one row a 2x2 tile     4 C multiply-adds a pixel: F(2x2, 3x3), errors within 2x of direct
//              36 planes, one row a 4x4 tile     2.25 C: F(4x4, 3x3), errors within 3x of direct
//   lines      rows are neighbours in a line     9 C multiply-adds a pixel, two an instruction and lane
//   positions  rows are one pixel of many images  the same without the taps outside the map: small maps
// Differences (Winograd) and products with padding turn an infinity into NaN where a convolution would not, so a call
// that meets a value that is not finite is run again: a stage with the direct method, a layer by the vendor.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/conv/division.h"
#include "cpu/products/pair_shape.h"

namespace wnfused::cpu {

constexpr int kTaps = 9;
constexpr int kMaxLevelTaps = 3;    // levels of a 3x3x3 kernel

// kPieces (pieces.h) and kPairs (pair_window.h) are single layers' alone.
enum class Method { kDirect, kWinograd2, kWinograd4, kLines, kPositions, kPieces, kPairs };

constexpr bool is_winograd(Method method) { return method == Method::kWinograd2 || method == Method::kWinograd4; }

struct BlockRange {
  int64_t begin, end;

  int64_t count() const { return end - begin; }
  bool operator==(const BlockRange& other) const { return begin == other.begin && end == other.end; }
};

struct Geometry : MapShape, Division {
  int64_t blocks;
  // Of a single convolution over three dims, by Winograd in two of them: `images` are the levels of volumes, so many
  // each, and an output sums over the level itself and `level_taps` / 2 on both sides, each with a bank of its own.
  int64_t levels, level_taps;
  // Of a convolution's outputs. A stage has as many as inputs.
  int64_t outputs, output_blocks, padded_outputs;
  // Channels that an output block sums over, those of its group, and output blocks that sum over the same ones. Where
  // there are several groups, which only layers have, both are whole blocks. Groups of channels that are none have
  // blocks in common, `sharing` of them or, the last ones, what is left, and count as one; weights from one to another
  // are zeros in a bank, or left out by whole blocks (met_blocks).
  int64_t groups, depth, depth_blocks, group_blocks, sharing;
  Method method;

  // Rows of the matrix products, numbered `units`: pixels, or tiles (tile x tile pixels) of a grid of tile_rows x
  // tile_cols an image.
  int64_t tile, tile_rows, tile_cols, units;
  int64_t planes, plane_stride;  // of a bank; the stride is padded so that planes do not share cache sets
  int64_t gradient_stride;       // of a plane of a weight gradient's bank
  // Winograd's weight gradient: the panels of a slice where they are gathered together and met input block by input
  // block (wgrad.h), or 0; whether an item leaves those of its inputs to the next one of the slice.
  int64_t wgrad_panels;
  bool wgrad_keeps;
  // Whether an item finishes the rows of its output blocks itself: the only slice's, with all levels. Its bank is a
  // worker's own, of one bundle; else a bank is a slice's, of all output blocks.
  bool wgrad_finishes;

  // Pairs of bfloat16 (pairs.h). A bank is [segments][bank_blocks][row_pixels][segment_depth / 2][16 lanes][2], of all
  // output blocks or, where it is narrow, of those of one bundle. A row of a product is so many neighbouring pixels
  // (pair_conv.h).
  int64_t segments, bank_blocks, segment_depth, row_pixels;
  int64_t pair_rows;                                                         // of the register tile
  bool pair_tiles;                                                           // which is a matrix
  int64_t conv_lines, conv_line_pixels, conv_line_rows;                      // lines: of a chunk; of a panel, a product
  // Lines, with tiles: the operands of a forward that saves nothing have a border of zeros, as panels have, and are
  // read in the place of these. Not where workers share all maps: a copy calls lines back from other cores many at a
  // time.
  bool bordered;
  int64_t wgrad_lines, wgrad_line_pixels, wgrad_chunks, wgrad_slice_chunks;
  int64_t wgrad_depth, wgrad_plane, wgrad_run;  // of a product; pixels of a channel, of a block of gradients
  bool wgrad_positions;  // the weight gradient's method, which need not be the convolution's; else lines
  // Whether its tiles have outputs as rows and inputs as lanes, and then whether a pair is one pixel of two images
  // (pair_wgrad.h); elements of the depth that taps reach, and images of a chunk.
  bool wgrad_turned, wgrad_by_images;
  int64_t wgrad_span, wgrad_images;

  bool is_winograd() const { return cpu::is_winograd(method); }
  bool is_pairs() const { return method == Method::kLines || method == Method::kPositions; }
  bool can_be_bordered() const {
    return method == Method::kLines && pair_tiles && !weights_stay && channels == padded_channels;
  }
  // Pixels of an operand map, its border among them: from line to line, from image to image, before the first one.
  int64_t operand_line() const { return bordered ? conv_line_pixels : width; }
  int64_t operand_image() const { return (bordered ? height + 2 : height) * operand_line(); }
  int64_t operand_origin() const { return bordered ? conv_line_pixels + 1 : 0; }
  int64_t operand_slack() const { return bordered ? pair_slack() : 0; }  // elements behind the last image
  int64_t operand_size() const {                                         // floats
    return is_pairs() ? (images * operand_image() * channels + operand_slack() + 1) / 2 : map_size();
  }
  int64_t taps() const { return kTaps * level_taps; }  // of the kernel
  // Of a row of v; and of one in scratch memory.
  int64_t row_channels() const { return depth / sharing; }
  int64_t row_floats() const { return row_channels() * taps(); }
  int64_t padded_row_floats() const { return depth_blocks * kLanes * taps(); }
  int64_t gradient_size() const { return taps() * gradient_stride; }
  // Of an output block: in a plane of a weight gradient's bank; in a plane, or a segment, of a bank.
  int64_t gradient_floats() const { return depth_blocks * kLanes * kLanes; }
  int64_t gradient_offset(int64_t output_block) const {
    return output_block * (wgrad_turned ? kLanes * kLanes : gradient_floats());
  }
  int64_t block_floats() const {
    return is_pairs() ? row_pixels * segment_depth * (kLanes / 2) : gradient_floats();
  }
  // An output block's group, the first block of channels that it sums over, and how many of its group there are.
  int64_t group_of(int64_t output_block) const { return output_block / group_blocks; }
  int64_t source_block(int64_t output_block) const { return group_of(output_block) * depth_blocks; }
  int64_t source_blocks(int64_t output_block) const {
    return std::min(depth_blocks, channel_blocks - source_block(output_block));
  }
  // The blocks of its group's channels that an output block has weights for; where groups share blocks, which have as
  // many channels out as in then, the output blocks that a block of channels has weights for, too.
  BlockRange met_blocks(int64_t block) const {
    if (sharing == 1) return {0, depth_blocks};
    const int64_t own = row_channels(), first = block % group_blocks * kLanes, last = first + kLanes - 1;
    return {first / own * own / kLanes, std::min(divide_up(last / own * own + own, kLanes), source_blocks(block))};
  }
  // The channels of these blocks that there are; others' memory may hold anything.
  int64_t channels_in(const BlockRange& met, int64_t output_block) const {
    const int64_t first = source_block(output_block);
    return std::min((first + met.end) * kLanes, channels) - (first + met.begin) * kLanes;
  }
  // How many output blocks from this one on, `most` of them, meet the same blocks.
  int64_t blocks_alike(int64_t block, int64_t most) const {
    if (sharing == 1) return most;
    int64_t count = 1;
    while (count < most && met_blocks(block + count) == met_blocks(block)) ++count;
    return count;
  }
  int64_t level_bank() const { return planes * plane_stride; }  // of one of level_taps
  // Whether any level of a volume has another one where this level of the kernel meets it.
  bool meets_level(int64_t level_tap) const {
    const int64_t step = level_tap - level_taps / 2;
    return -levels < step && step < levels;
  }
  int64_t bank_size() const {
    if (is_pairs()) return segments * bank_blocks * block_floats();
    return level_taps * level_bank();
  }
  // Pairs: where a bank has a segment's filters for one output block, from the first depth on, in bfloat16 elements;
  // and those for another pixel of a row, or the next block, so many further.
  int64_t filters_offset(int64_t segment, int64_t output_block) const {
    return (segment * bank_blocks + output_block) * row_pixels * filters_stride();
  }
  int64_t filters_stride() const { return segment_depth * kLanes; }
  // Pairs: bfloat16 elements of a worker's panels. A convolution's last tile reads past its last row.
  int64_t pair_slack() const { return (pair_rows + 4) * row_pixels * padded_channels; }
  int64_t conv_panel() const {
    const int64_t rows =
        method == Method::kLines ? (conv_lines + 2) * conv_line_pixels : height * width * conv_rows;
    return rows * padded_channels + pair_slack();
  }
  int64_t wgrad_inputs() const {
    if (wgrad_turned) return wgrad_segments() * wgrad_span * kLanes;
    return padded_channels * (wgrad_positions ? wgrad_run : wgrad_plane);
  }
  int64_t wgrad_gradients() const {
    return wgrad_bundle_blocks * kLanes * (wgrad_turned ? wgrad_plane : wgrad_run);
  }
  // Where a worker's scratch has the parts of a convolution (the panel, sums) and of a weight gradient (segments,
  // inputs, gradients), in floats, and where they end.
  int64_t conv_sums_at() const { return panel_floats(conv_panel()); }
  int64_t conv_scratch() const { return conv_sums_at() + kTileSums; }
  int64_t wgrad_inputs_at() const { return segment_floats(wgrad_segments()); }
  int64_t wgrad_gradients_at() const { return wgrad_inputs_at() + panel_floats(wgrad_inputs()); }
  int64_t wgrad_scratch() const { return wgrad_gradients_at() + panel_floats(wgrad_gradients()); }
  // Floats: the same of a weight gradient that is not one of pairs. A worker's scratch has panels of inputs, of
  // gradients, sums or, where the latter two have been read, what finishing takes; then the bank that is its own.
  int64_t panels_at_once() const { return std::max<int64_t>(wgrad_panels, 1); }
  int64_t input_panel() const {
    const int64_t rows = wgrad_panels ? depth_blocks * (wgrad_rows | 1) : (depth_blocks * wgrad_rows) | 1;
    return planes * rows * kLanes;
  }
  int64_t gradient_panel() const { return planes * ((wgrad_bundle_blocks * wgrad_rows) | 1) * kLanes; }
  int64_t sums_stride() const {
    return wgrad_bundle_blocks * (wgrad_panels ? kLanes * kLanes : gradient_floats()) + kLanes;
  }
  int64_t gradient_panels_at() const { return panels_at_once() * input_panel(); }
  int64_t sums_at() const { return gradient_panels_at() + panels_at_once() * gradient_panel(); }
  int64_t own_gradient_at() const {
    const int64_t sums = is_winograd() ? planes * sums_stride() : 0;
    return std::max(sums_at() + sums, gradient_panels_at() + (wgrad_finishes ? finish_floats() : 0));
  }
  int64_t finish_floats() const { return kLanes * kLanes * taps() + kFinishRows * padded_row_floats(); }
  int64_t wgrad_segments() const {
    if (wgrad_turned) return wgrad_by_images ? (wgrad_images + 1) / 2 : wgrad_images;
    return wgrad_positions ? height * width : wgrad_lines;
  }
};

// Slices, which fix the order of every sum, depend on the shape alone; how a convolution is divided depends on the
// number of workers too, and changes no result.
Geometry make_geometry(int64_t images, int64_t channels, int64_t height, int64_t width, int64_t blocks, Method method,
                       int64_t workers);

// How many levels a volume has, and a kernel.
struct Levels {
  int64_t of_map, of_kernel;
};

// Channels that a convolution reads and writes, in so many groups: of several ones whole blocks, or as many from
// either, groups of which fill blocks.
struct Channels {
  int64_t inputs, outputs, groups;
};

// Of one convolution.
Geometry make_single_geometry(int64_t images, const Levels& levels, const Channels& channels, int64_t height,
                              int64_t width, Method method, int64_t workers);

// Divides a wide layer's convolution anew, so that it packs its banks bundle by bundle.
void pack_by_bundles(Geometry& geometry, int64_t workers);

// Divides a layer's weight gradient anew, so that whoever sums it finishes it, where that leaves enough items.
void finish_with_sums(Geometry& geometry, int64_t workers);

Geometry make_pair_geometry(int64_t images, int64_t channels, int64_t height, int64_t width, int64_t blocks,
                            const PairTile& tile, int64_t workers);

// The method of those for floats that needs the least work on such maps.
Method preferred_method(int64_t images, int64_t height, int64_t width);

// "direct", "winograd2" and the like, as tests and bench/ have them.
const char* name_of(Method method);

// Floats that a worker needs: panel and product of one chunk, or what packing and finishing take. And those of the line
// of zeros, which whoever runs the kernels must clear: the same from x to y and back.
int64_t worker_floats(const Geometry& geometry);
int64_t zeros_floats(const Geometry& geometry);
int64_t packing_offset(const Geometry& geometry);  // see Scratch

}  // namespace wnfused::cpu

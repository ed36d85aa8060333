// A convolution over any window as matrix products: a direct sum over the taps of the kernel.
//
// One Window describes one way through a layer, from the map that is read (`source`) to the one that is written
// (`target`); the data gradient is another Window, from y's map to x's. Rows of the products are pixels of the target:
//
//   forward         stride 2                    data gradient
//   target  y[i]    one grid                    x[2i + r], r = 0, 1: two grids
//   source  x[2i + k d - p]                     y[i + (r + p - k d) / 2], of the taps k for which that is whole
//
// A grid is the pixels that meet the same taps; within it, target and source move in equal steps, so each tap is one
// offset. A layer with stride s has s data-gradient grids a dim and none of them multiplies by zeros.
//
// A source of few channels ("thin": an image, a waveform) has no padding between its pixels, so that the taps of one
// row of the kernel read one run of memory. They count as one tap then, of so many channels more.
//
// Layout of a bank as in memory.h: [tap][output block][input channel][16 lanes]. With groups, the input channels are
// those of the block's group. Groups whose outputs are no whole blocks share theirs, two of 8 outputs, four of 4, each
// with zeros for the others' channels. Depthwise layers (depthwise.h), groups of one channel, do not: a tap has one
// entry a lane, [tap][block][16 lanes].
//
// A map over three dims is levels of rows: its lines, height = levels x rows of them, are numbered through all levels,
// as if it had two dims, and lie at equal distances (with_even_lines in layer/formats.h). Only the taps, a border and
// what a Grid counts know of levels.
//
// `pixel` and `target_pixel` are the maps' own where these are read or written in place; depthwise kernels do not ask.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/conv/division.h"

namespace wnfused::cpu {

// Numbers of levels, of rows and of columns. A convolution over two dims has one level, over one dim also one row.
struct Triple {
  int64_t level, row, column;

  int64_t product() const { return level * row * column; }
};

inline bool operator==(const Triple& a, const Triple& b) {
  return a.level == b.level && a.row == b.row && a.column == b.column;
}

// More than these are left to the vendor.
constexpr int64_t kMaxWindowTaps = 128, kMaxGrids = 16;

// Sources of fewer channels are thin.
constexpr int64_t kThin = 8;

// A layer y = conv(x, w), zero padding.
struct ConvShape {
  int64_t images, inputs, outputs;
  Triple size, kernel, stride, padding, dilation;  // size: of a map of x
  int64_t groups;

  int64_t taps() const { return kernel.product(); }
  int64_t output_pixels() const { return images * output_size().product(); }
  bool is_depthwise() const { return groups > 1 && groups == inputs && groups == outputs; }
  bool has_thin_input() const { return groups == 1 && inputs < kThin; }
  // A 1x1 layer, whose windows are the pixels of its map.
  bool is_pointwise() const { return taps() == 1 && stride.product() == 1 && padding == Triple{0, 0, 0}; }
  // No pixel is in two windows.
  bool has_windows_apart() const;
  // Two dims or fewer describe it: no tap, and no step, leads from its level.
  bool has_one_level() const {
    return size.level == 1 && kernel.level == 1 && padding.level == 0 && stride.level == 1;
  }
  // The same layer of single pixels, over maps whose levels lie one below the other.
  ConvShape without_levels() const {
    ConvShape shape = *this;
    shape.size = {1, size.level * size.row, size.column};
    return shape;
  }
  // Whether it is a convolution at all: only then it has an output_size().
  bool is_sound() const;
  // How many pairs of an output pixel and a tap, of one image, meet the map and not the padding.
  int64_t met_taps() const;
  // Whether a Window has room for its taps and its stride.
  bool fits_window() const;
  Triple output_size() const;
};

// Whether a window of the layer over several taps takes the pixels of all images position by position (Window), the
// target's map being of that size: many small images, or taps that meet padding.
bool goes_by_position(const ConvShape& shape, const Triple& target);

// A map of so many pixels.
MapShape map_of_size(int64_t images, int64_t channels, const Triple& size);

// One plane of the bank, and where in the source it meets a unit of a grid, from that unit's own place.
struct Tap {
  int64_t plane, level, row, column;
};

struct Grid {
  Triple origin, size;  // in the target, of one image
  int64_t first_tap, taps;
  int64_t first_chunk;
};

// [begin, end)
struct LaneRange {
  int64_t begin, end;
};

struct Window : Division {
  MapShape source, target;
  Triple source_size, target_size;  // of an image
  bool thin;                    // of few input channels: pixels without padding, a kernel's row of taps as one tap
  int64_t pixel, target_pixel;  // floats from one pixel of the source, and of the target, to the next
  int64_t tap_columns;          // of the kernel, which one tap stands for
  bool leaves_map;              // some units meet a place beyond the source at some tap
  // A thin source has a border of zeros as wide as they reach: before its first level, row and column, and from one row
  // of pixels to the next. A level has so many `lines` then, and a line `pitch` pixels. Any other has none, and what
  // lies beyond it is read elsewhere (conv.h).
  Triple before, after;
  int64_t lines, pitch;
  Triple source_step, target_step;
  int64_t grid_count;
  Grid grids[kMaxGrids];
  Tap taps[kMaxWindowTaps];  // of one grid after the other
  // Units of a grid are numbered image by image; or position by position, all images at one in turn, so that a panel of
  // many small images skips the taps that meet nothing but padding.
  bool by_position;
  int64_t output_blocks, padded_outputs;  // of the target
  int64_t groups, sharing;                // sharing: how many groups have their output blocks in common
  int64_t depth, bank_depth;              // channels that an output block sums over at a tap; in the bank, padded
  int64_t group_blocks, group_channels;   // output blocks that sum over the same channels; from these to the next ones
  int64_t planes, plane_stride;

  int64_t bank_size() const { return planes * plane_stride; }
  int64_t gradient_size() const { return bank_size(); }
  int64_t block_floats() const { return bank_depth * kLanes; }
  // In a row of v: input channels, taps of the kernel, and both; and where in the bank an entry of it is, from the
  // lanes of an output block's first.
  int64_t row_channels() const { return depth / (tap_columns * sharing); }
  int64_t row_taps() const { return planes * tap_columns; }
  int64_t row_floats() const { return row_channels() * row_taps(); }
  int64_t bank_offset(int64_t tap, int64_t channel) const {
    if (tap_columns == 1) return tap * plane_stride + channel * kLanes;
    return tap / tap_columns * plane_stride + (tap % tap_columns * row_channels() + channel) * kLanes;
  }
  // The outputs of an output block that are the `share`-th's of the groups that have it in common: none may be.
  LaneRange lanes_of(int64_t output_block, int64_t share) const {
    const int64_t outputs = target.channels / groups, group = output_block / group_blocks * sharing + share;
    const int64_t first = group * outputs - output_block * kLanes;
    return {std::clamp<int64_t>(first, 0, kLanes), std::clamp<int64_t>(first + outputs, 0, kLanes)};
  }
  // The first of the channels that an output block sums over.
  int64_t first_channel(int64_t output_block) const { return output_block / group_blocks * group_channels; }
  bool has_border() const { return !(before == Triple{0, 0, 0} && after == Triple{0, 0, 0}); }
  // Of an image.
  int64_t padded_pixels() const { return (before.level + source_size.level + after.level) * lines * pitch; }
  int64_t padded_size() const { return source.images * padded_pixels() * pixel; }
  // The pixel at a line, numbered through all images, and a column.
  int64_t padded_index(int64_t line, int64_t column) const {
    const int64_t image = line / source.height, within = line % source.height;
    const Triple at{within / source_size.row, within % source_size.row, column};
    return image * padded_pixels() + padded_offset(at);
  }
  // Pixels from the first one of an image, or from a unit's to a tap's.
  int64_t padded_offset(const Triple& at) const { return from(before, at); }
  int64_t tap_offset(const Tap& tap) const { return from({0, 0, 0}, {tap.level, tap.row, tap.column}); }
  // Whether units are the target's pixels, in their order.
  bool is_run() const { return grid_count == 1 && !by_position; }
  // Whether they are the source's pixels, too.
  bool is_pointwise() const {
    return is_run() && planes == 1 && !leaves_map && source_size == target_size;
  }
  // Whether the weight gradient is taken as one product of matrices (product_wgrad.h): with fewer channels a sum over
  // the window, which packs nothing, is as fast.
  bool has_product_gradient() const {
    return is_pointwise() && groups == 1 && bank_depth >= 128 && target.pixels() >= 256;
  }
  int64_t units(const Grid& grid) const { return target.images * grid.size.product(); }

 private:
  int64_t from(const Triple& first, const Triple& at) const {
    return ((first.level + at.level) * lines + first.row + at.row) * pitch + first.column + at.column;
  }
};

// thin: of a thin input; the source is laid out as such.
Window forward_window(const ConvShape& shape, bool thin, int64_t workers);
Window backward_window(const ConvShape& shape, int64_t workers);

// Divides a wide layer's convolution anew, so that it packs its banks bundle by bundle.
inline void pack_by_bundles(Window& window, int64_t) {
  constexpr int64_t kPair = 2;  // of blocks, which a register tile is made of
  const int64_t block = window.planes * window.block_floats();
  if (!window.weights_dominate || !divide_into_bundles(kPair, block, window)) narrow_banks(window);
}

// Floats that a worker needs: panel and product of one chunk, or what packing and finishing take. And those of the line
// of zeros, which whoever runs the kernels must clear: the same from x to y and back.
int64_t worker_floats(const Window& window);
int64_t zeros_floats(const Window& window);

}  // namespace wnfused::cpu

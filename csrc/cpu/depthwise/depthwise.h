// Depthwise layers, every channel a group of its own: a direct sum over the taps, 16 channels at a time.
//
// Such a layer does few products for each number that it moves, so a number is moved once: an item is a few blocks
// of channels of a tile, a rectangle of the map, and everything that is to be done there.
//
//   forward    x | y = act(conv(x, w) + b + residual)
//   backward   dz = act'(y) dy, x | dx = conv'(dz, w), dw += x * dz
//
// What stands before '|' is copied to memory of the worker's own, with what the taps reach around the tile and zeros
// beyond the ends of a row; rows beyond the map are left out.
//
// Floor: a multiply-add a tap and output, twice that backward.
#pragma once

#include "cpu/window/window.h"

namespace wnfused::cpu {

struct Span {
  int64_t begin, end;

  int64_t count() const { return end - begin; }
};

struct Region {
  Span rows, columns;

  int64_t pixels() const { return rows.count() * columns.count(); }
};

// A Window, cut into tiles: (rows, columns) of an image's target, and of its source by the same cuts. Slices of the
// weight gradient are runs of tiles, numbered through all images.
struct Depthwise : Window {
  Triple tiles;
  Triple first_tap, last_tap;  // how far the taps reach
  int64_t blocks_at_once, bundles;

  int64_t tile_count() const { return target.images * tiles.product(); }
  int64_t conv_items() const { return tile_count() * bundles; }
  int64_t wgrad_items() const { return wgrad_slices * bundles; }
  // The pixels of a map that are the tile's own.
  Region tile(const MapShape& map, int64_t index) const;
  // The pixels of the source that a region of the target reads; of the rows only those that exist.
  Region reach(const Region& region) const;
};

// How many items the work should be cut into. The backward's depends on the shape alone: it fixes the order of sums.
int64_t forward_shares(int64_t workers);
int64_t backward_shares(const ConvShape& shape);

// Whether what an item holds of its maps is no more than some megabytes: not with very wide windows or borders.
bool has_small_tiles(const ConvShape& shape);

// From x's map to y's, or back.
Depthwise make_depthwise(const ConvShape& shape, bool back, int64_t pieces);

// The pixels of y that tile `index` of the backward reads.
Region gradient_region(const Depthwise& forward, const Depthwise& back, int64_t index);

// Pixels of the largest regions of each map.
struct DepthwiseRoom {
  int64_t x, y, dx;
};

DepthwiseRoom forward_room(const Depthwise& forward);
DepthwiseRoom backward_room(const Depthwise& forward, const Depthwise& back);

// No line of zeros is needed (scratch.h): regions have zeros of their own.
inline int64_t zeros_floats(const Depthwise&) { return 0; }

}  // namespace wnfused::cpu

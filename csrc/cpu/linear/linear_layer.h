// A linear layer on products of this library (gemm.h), for more rows of x than small.h takes: of bfloat16, of floats in
// pieces, and of floats that panel.h leaves. The jobs of the latter stand here, too.
//
//              product          wide, kept in cache       narrow, past it      depth    an item
//   forward    y^T = w x^T      x    [M], transposed      rows of w            K        rows of x, rows of v
//   dx         dz w             w    [K]                  rows of dz           N        columns, rows of dx
//   dw         dz^T x           x    [K]                  columns of dz        M        rows of v; then dv and dg
//
// v is scaled where it is packed, w = g v / ||v|| as eager has it, so that the products have the range of an
// un-normalised layer's; with x in bfloat16 w is rounded to it. Forward, an item reads its rows of v from memory once,
// for the norms, and again from cache. On tiles, which multiply faster than that, the forward is one of its own
// (tile_forward.h).
//
// A line that another core has written comes at the price of a hundred multiply-adds, so every worker packs what it
// multiplies by itself; only a large x, which is in no core's own cache, is packed together, in a phase before dw.
//
// The order of every sum depends on the shape alone.
#pragma once

#include <algorithm>
#include <atomic>

#include "cpu/layer/layer.h"
#include "cpu/machine/work_queue.h"
#include "cpu/products/wide.h"

namespace wnfused::cpu {

constexpr int64_t kInputRows = 256;     // of dx in an item
constexpr int64_t kTileItemRows = 512;  // of v in an item of the forward on tiles, at most

// `count` blocks of 16 rows or columns cut into `parts`, as even as can be.
struct Cut {
  int64_t count, parts;

  int64_t begin(int64_t part) const { return count * part / parts; }
  int64_t largest() const { return divide_up(count, parts); }

  // What a part has of `entries` rows or columns, of which the last block may have fewer.
  int64_t first(int64_t part) const { return begin(part) * kLanes; }
  int64_t size(int64_t part, int64_t entries) const { return std::min(first(part + 1), entries) - first(part); }
};

// Floats from one row of sums to the next: powers of two would put a tile's rows into one set of a cache.
constexpr int64_t row_stride(int64_t blocks) { return (blocks + 1) * kLanes; }

// Rows of v in an item of the forward on tiles that has so many of x: each pass over x serves them all, but their sums
// have to stay in the second level of cache.
constexpr int64_t tile_item_rows(int64_t lanes) {
  constexpr int64_t kSums = 1 << 16;
  return std::clamp(kSums / lanes / kNarrowRows, int64_t{1}, kTileItemRows / kNarrowRows) * kNarrowRows;
}

// What split_range.h asks of the largest entry of a row: between 2^-kSplitExponent and 2^kSplitExponent. Here it is
// given as the bits of its absolute value.
constexpr uint32_t kSplitExponent = 50;

constexpr bool in_split_range(uint32_t largest) {
  constexpr uint32_t kLeast = (127 - kSplitExponent) << 23, kMost = (127 + kSplitExponent) << 23;
  return largest == 0 || (largest >= kLeast && largest <= kMost);
}

// Where x is packed: by worker w at x + w * x_stride, by all of them together where x_stride is 0. The rest of its
// memory begins at worker + w * worker_stride.
struct LinearMemory {
  float *x, *worker;
  int64_t x_stride, worker_stride;
};

// x [rows, inner], v [features, inner], y [rows, features], all dense.
struct LinearForward {
  int64_t rows, inner, features;
  Values x, v, y, residual;  // residual.data may be null
  const float *gain, *bias;  // bias may be null
  float* norm;
  Activation activation;
  float slope;
  Cut groups, row_blocks;  // an item has one of each: rows of x, rows of v
  LinearMemory memory;
  // Set where pieces would not do (split_range.h), or sums of bfloat16 v do not wait for their scale: then nothing of
  // it counts but the norms.
  std::atomic<bool>* out_of_range;
  bool scales_first;  // of bfloat16, after that: w is rounded, not v, by the norms that are known
};

// dx, or dv and dgain, may be null.
struct LinearBackward {
  int64_t rows, inner, features;
  Values x, v, dz, dx, dv;
  const float *gain, *norm, *scale;
  float* dgain;
  Cut input_rows, input_columns;  // an item of dx has one of each
  Cut row_blocks;                 // an item of dv: its rows
  LinearMemory memory;
  std::atomic<bool>* out_of_range;
};

// A part of a forward of floats by panels (panel_forward.h): all that has rows of x and features in these ranges. Those
// that begin at row 0 store the norms. panel: room for as many panels as the kernels take at once, each of 16 rows of
// v, of a length that is a multiple of 16.
struct PanelShare {
  int64_t row_begin, row_end, feature_begin, feature_end;
  float* panel;
};

// The backward of floats, by panels of 16 columns (panel_backward.h).
struct PanelBackward {
  static constexpr int64_t kDepth = 512, kGroup = 4;  // of a panel, and so many at once: they stay in L2

  int64_t rows, inner, features;
  const float *x, *v, *dz, *gain, *norm, *scale;
  float *dx, *dv, *dgain;
  Cut input_rows, input_blocks;    // an item of dx has one of each: rows, blocks of columns
  Cut weight_rows, weight_blocks;  // one of dv
  float* turned;                   // room for dz^T, of turned_stride floats a row
  int64_t turned_stride;
  float* panels;  // worker by worker, room for a group
  int64_t panel_floats;
};

// The forward says whether the range sufficed, as the small one does.
struct PanelKernels {
  int64_t tile;    // rows of x that a panel meets at once
  int64_t panels;  // that are taken at once
  bool (*forward)(const SmallLinear&, const PanelShare&);
  void (*backward)(const PanelBackward&, Worker&);
};

struct LinearKernels {
  DepthUnit unit;
  bool tiles;  // the forward is that of tile_forward.h
  bool (*small_pairs)(const SmallLinear&, int64_t begin, int64_t end);  // null where units are no pairs
  void (*forward)(const LinearForward&, Worker&);
  void (*backward)(const LinearBackward&, Worker&);
  // Of floats in pieces (split_range.h): whether rows [begin, end) of a matrix are in range, and its columns' sizes.
  bool (*rows_in_range)(const float* matrix, int64_t begin, int64_t end, int64_t length, uint32_t* columns) = nullptr;
};

namespace avx512 {
extern const LinearKernels linear_kernels;
extern const PanelKernels panel_kernels;
}
namespace avx512_bf16 {
extern const LinearKernels linear_kernels;
}
namespace avx2 {
extern const LinearKernels linear_kernels;
extern const PanelKernels panel_kernels;
}
namespace amx {
extern const LinearKernels linear_kernels, split_linear_kernels;
}
namespace amx_emulated {
extern const LinearKernels linear_kernels, split_linear_kernels;
}

// Those of the instruction set in use; null without vectors of the processor's own.
const PanelKernels* panel_kernels();

// Those of floats in pieces, where there are tiles; else null.
const LinearKernels* split_linear_kernels();

// Those of the instruction set in use for so many rows of x in that type; null where the vendor's products do better.
const LinearKernels* linear_kernels(bool bfloat16, int64_t rows);

}  // namespace wnfused::cpu

// One call of the residual stage, as the op entries hand it to the kernels of an instruction set.
//
// For block b = 0..B-1, with effective weights w = s v, s = g / ||v|| a row:
//   a_b     = relu(s_0 conv(h_b, v_0) + bias_0)
//   h_{b+1} = skip_scale (h_b + s_1 conv(a_b, v_1) + bias_1)
//
// Layouts (C is padded to Cp, a multiple of 16 channels, by zeros):
//   map      [N, H, W, Cp] fp32           h, a and their gradients: no border, the gather supplies the zeros
//   bank     [planes][Op/16][Cp][16]      one convolution's packed weights, or with nine planes the gradient of them,
//                                         fp32: plane (tap, or Winograd position), output block, input channel, output
//                                         lane
//   operand  [N, H, W, C] bfloat16        what the convolutions of the last two methods read: h, a, dh, da rounded
// Where C needs no padding and everything is fp32, the canonical saved maps [.., N, H, W, C] ARE maps in this sense and
// the kernels write and read them in place; otherwise an epilogue stores a converted copy. In bfloat16 the saved maps are
// the operands.
//
// Four methods compute a convolution, all as matrix products of a gathered panel with a bank. Two multiply floats (see
// stage_conv.h), two pairs of bfloat16 (see stage_pairs.h), where the processor has an instruction for it:
//   direct     9 planes, one row a pixel         9 C multiply-adds a pixel, exact zero padding: maps under 4x4
//   winograd   16 planes, one row a 2x2 tile     4 C multiply-adds a pixel: F(2x2, 3x3), errors within 2x of direct
//              36 planes, one row a 4x4 tile     2.25 C: F(4x4, 3x3), errors within 3x of direct
//   lines      rows are neighbours in a line     9 C multiply-adds a pixel, two an instruction and lane
//   positions  rows are one pixel of many images  the same without the taps outside the map: small maps
// Differences (Winograd) and products with padding turn an infinity into NaN where a convolution would not, so a call
// that meets a value that is not finite is run again with the direct method (`poisoned` below).
#pragma once

#include <atomic>
#include <cstdint>

#include "division.h"
#include "work_queue.h"

namespace wnfused::cpu {

constexpr int kTaps = 9;
constexpr int kMaxLevelTaps = 3;    // levels of a 3x3x3 kernel
constexpr int kMaxGroups = 16;      // register tiles of one call of a pair product

// kPieces (pieces.h) is a single layer's alone.
enum class Method { kDirect, kWinograd2, kWinograd4, kLines, kPositions, kPieces };

// How an instruction set multiplies pairs of bfloat16: rows of a panel at once, and what the depth must be a multiple of.
// Tiles sum over a whole chunk at once, dot products line by line.
struct PairTile {
  int64_t rows, depth;
  bool flat;
};

struct Geometry : MapShape, Division {
  int64_t blocks;
  // Of a single convolution over three dims, by Winograd in two of them: `images` are the levels of volumes, so many
  // each, and an output sums over the level itself and `level_taps` / 2 on both sides, each with a bank of its own.
  int64_t levels, level_taps;
  // Of a convolution's outputs. A stage has as many as inputs.
  int64_t outputs, output_blocks, padded_outputs;
  Method method;

  // Rows of the matrix products, numbered `units`: pixels, or tiles (tile x tile pixels) of a grid of tile_rows x
  // tile_cols an image.
  int64_t tile, tile_rows, tile_cols, units;
  int64_t planes, plane_stride;  // of a bank; the stride is padded so that planes do not share cache sets

  // Pairs of bfloat16 (stage_pairs.h). A bank is [segments][output block][segment_depth / 2][16 lanes][2].
  int64_t segments, segment_depth;
  int64_t pair_rows;                                                         // of the register tile
  int64_t conv_lines, conv_line_pixels, conv_line_rows;                      // lines: of a chunk; of a panel, a product
  int64_t wgrad_lines, wgrad_line_pixels, wgrad_chunks, wgrad_slice_chunks;
  int64_t wgrad_depth, wgrad_plane, wgrad_run;  // of a product; pixels of a channel, of a block of gradients
  bool wgrad_flat;

  bool is_winograd() const { return method == Method::kWinograd2 || method == Method::kWinograd4; }
  bool is_pairs() const { return method == Method::kLines || method == Method::kPositions; }
  int64_t operand_size() const { return is_pairs() ? (pixels() * channels + 1) / 2 : map_size(); }  // floats
  int64_t taps() const { return kTaps * level_taps; }  // of the kernel
  int64_t gradient_size() const { return taps() * plane_stride; }
  int64_t block_floats() const { return padded_channels * kLanes; }  // of an output block of a plane
  int64_t level_bank() const { return planes * plane_stride; }  // of one of level_taps
  int64_t bank_size() const {
    if (is_pairs()) return segments * channel_blocks * segment_depth * (kLanes / 2);
    return level_taps * level_bank();
  }
  // Pairs: bfloat16 elements of a worker's panels. A convolution's last tile reads past its last row.
  int64_t pair_slack() const { return (pair_rows + 4) * padded_channels; }
  int64_t conv_panel() const {
    const int64_t rows =
        method == Method::kLines ? (conv_lines + 2) * conv_line_pixels : height * width * conv_rows;
    return rows * padded_channels + pair_slack();
  }
  int64_t wgrad_inputs() const {
    return padded_channels * (method == Method::kLines ? wgrad_plane : wgrad_run);
  }
  int64_t wgrad_gradients() const { return wgrad_group_blocks * kLanes * wgrad_run; }
  // Of a plane of sums (stage_wgrad.h).
  int64_t sums_stride() const { return wgrad_group_blocks * padded_channels * kLanes + kLanes; }
  int64_t wgrad_segments() const { return method == Method::kLines ? wgrad_lines : height * width; }
};

// Slices, which fix the order of every sum, depend on the shape alone; how a convolution is divided depends on the
// number of workers too, and changes no result.
Geometry make_geometry(int64_t images, int64_t channels, int64_t height, int64_t width, int64_t blocks, Method method,
                       int64_t workers);

// How many levels a volume has, and a kernel.
struct Levels {
  int64_t of_map, of_kernel;
};

// Of one convolution, from `channels` to `outputs`.
Geometry make_single_geometry(int64_t images, const Levels& levels, int64_t channels, int64_t outputs, int64_t height,
                              int64_t width, Method method, int64_t workers);

// Divides a wide layer's convolution anew, so that it packs its banks group by group.
void pack_by_groups(Geometry& geometry);

Geometry make_pair_geometry(int64_t images, int64_t channels, int64_t height, int64_t width, int64_t blocks,
                            const PairTile& tile, int64_t workers);

// The method of those for floats that needs the least work on such maps.
Method preferred_method(int64_t images, int64_t height, int64_t width);

// As in the list above.
const char* name_of(Method method);

// A tensor [N, C, H, W] of the caller in any strides, levels of rows being rows, or a parameter in its own order.
struct ExternalMap {
  void* data;
  bool bfloat16;
  int64_t image_stride, channel_stride, row_stride, column_stride;
};

struct Parameter {
  void* data;
  bool bfloat16;
  // v and dv: a row is [taps][C], channels_last, not [C][taps]; then fp32, and for the stage's kernels C a multiple of 16.
  bool taps_first = false;
};

// The canonical maps [.., N, H, W, C]. every == 0: h_b and a_b of every block; every == k: h_b where k divides b, fp32.
struct SavedMaps {
  void* data;  // null: nothing is saved
  bool bfloat16;
  int64_t every;
  bool in_place;  // every == 0 and the saved maps have the kernels' own layout
};

// One convolution's effective weights (floats, or pairs of bfloat16) and bias, ready for use.
struct Bank {
  float* weights;
  float* bias;
};

struct Scratch {
  float* zeros;          // one line of zeros, what lies above and below the map
  Bank bank[2];          // shared, of a block's two convolutions: each is packed while the other one is in use
  float* own_bank;       // or one to a worker, `own_bank_stride` floats each
  int64_t own_bank_stride;
  float* stream;         // h, or dh
  float* operand;        // pairs: h, or dh, rounded
  float* hidden;         // a, or da
  float* recomputed;     // pairs, recomputation: h
  float* saved_stream;   // backward: h_b where the saved map cannot be read in place; one per recomputed block
  float* saved_hidden;   // backward: a_b likewise
  float* gradient[2];    // banks of the weight gradient, one per slice
  float* bias_gradient[2];
  float* worker;         // private to a worker, `worker_stride` floats each
  int64_t worker_stride;
  int64_t packing;       // how far in that the part of packing begins: behind a panel that is used again
};

struct StageForward {
  Geometry geometry;
  ExternalMap x, y;
  Parameter v, g, bias;
  float skip_scale;
  bool round_operands;  // operands of the convolutions are bfloat16, held as fp32
  float* norm;
  SavedMaps saved;
  Scratch scratch;
  std::atomic<bool>* poisoned;  // set when a value is not finite
};

struct StageBackward {
  Geometry geometry;
  ExternalMap dy, dx;
  Parameter v, g, bias;
  Parameter dv, dg, dbias;
  bool parameters;
  float skip_scale;
  bool round_operands;
  const float* norm;
  SavedMaps saved;
  Scratch scratch;
  std::atomic<bool>* poisoned;
};

// What an instruction set provides. Every worker of a call runs the same function.
struct StageKernels {
  void (*forward)(const StageForward&, Worker&);
  void (*backward)(const StageBackward&, Worker&);
};

namespace avx512 {
extern const StageKernels stage_kernels;
}
namespace avx2 {
extern const StageKernels stage_kernels;
}
namespace portable {
extern const StageKernels stage_kernels;
}

// What an instruction set provides that multiplies pairs of bfloat16.
struct StagePairKernels {
  PairTile tile;
  StageKernels kernels;
};

namespace avx512_bf16 {
extern const StagePairKernels stage_pair_kernels;
}
namespace amx {
extern const StagePairKernels stage_pair_kernels;
}
namespace amx_emulated {
extern const StagePairKernels stage_pair_kernels;
}

}  // namespace wnfused::cpu

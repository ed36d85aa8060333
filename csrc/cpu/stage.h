// One call of the residual stage, as the op entries hand it to the kernels of an instruction set.
//
// For block b = 0..B-1, with effective weights w = s v, s = g / ||v|| a row:
//   a_b     = relu(s_0 conv(h_b, v_0) + bias_0)
//   h_{b+1} = skip_scale (h_b + s_1 conv(a_b, v_1) + bias_1)
//
// Layouts (all fp32; C is padded to Cp, a multiple of 16 channels, by zeros):
//   map      [N, H, W, Cp]                h, a and their gradients: no border, the gather supplies the zeros
//   bank     [planes][Cp/16][Cp][16]      one convolution's packed weights, or the gradient of them:
//                                         plane (tap, or Winograd position), output block, input channel, output lane
// Where C needs no padding and everything is fp32, the canonical saved maps [.., N, H, W, C] ARE maps in this sense and
// the kernels write and read them in place; otherwise an epilogue stores a converted copy.
//
// Two methods compute a convolution, both as matrix products of a gathered panel with a bank (see stage_conv.h):
//   direct    9 planes, one row a pixel         9 C multiply-adds a pixel, exact zero padding: maps under 4x4
//   winograd  16 planes, one row a 2x2 tile     4 C multiply-adds a pixel: F(2x2, 3x3), errors within 2x of direct
// Winograd's differences turn an infinity into NaN where a convolution would not, so a call that meets a value that is
// not finite is run again with the direct method (`poisoned` below).
#pragma once

#include <atomic>
#include <cstdint>

#include "work_queue.h"

namespace wnfused::cpu {

constexpr int kLanes = 16;
constexpr int kTaps = 9;
constexpr int kPositions = 16;
constexpr int kMaxPanelRows = 64;

enum class Method { kDirect, kWinograd };

struct Geometry {
  int64_t images, channels, height, width, blocks;
  int64_t channel_blocks, padded_channels;
  Method method;

  // Rows of the matrix products, numbered `units`: pixels, or tiles of a grid of tile_rows x tile_cols an image.
  int64_t tile_rows, tile_cols, units;
  int64_t planes, plane_stride;  // of a bank; the stride is padded so that planes do not share cache sets

  // A convolution: chunks of panel rows x groups of output blocks.
  int64_t conv_rows, conv_chunks, conv_groups, conv_group_blocks;
  // A weight gradient: slices of consecutive units, each summed into its own bank, x groups of output blocks.
  int64_t wgrad_rows, wgrad_slices, wgrad_slice_units, wgrad_groups, wgrad_group_blocks;

  int64_t pixels() const { return images * height * width; }
  int64_t map_size() const { return pixels() * padded_channels; }
  int64_t bank_size() const { return planes * plane_stride; }
  int64_t conv_items() const { return conv_chunks * conv_groups; }
  int64_t wgrad_items() const { return wgrad_slices * wgrad_groups; }
};

// Depends on the shape alone, never on the number of threads: chunks and slices fix the order of every sum.
Geometry make_geometry(int64_t images, int64_t channels, int64_t height, int64_t width, int64_t blocks, Method method);

// The method that needs less work on such maps.
Method preferred_method(int64_t images, int64_t height, int64_t width);

// A tensor [N, C, H, W] of the caller in any strides, or a parameter in its own order.
struct ExternalMap {
  void* data;
  bool bfloat16;
  int64_t image_stride, channel_stride, row_stride, column_stride;
};

struct Parameter {
  void* data;
  bool bfloat16;
};

// The canonical maps [.., N, H, W, C]. every == 0: h_b and a_b of every block; every == k: h_b where k divides b, fp32.
struct SavedMaps {
  void* data;  // null: nothing is saved
  bool bfloat16;
  int64_t every;
  bool in_place;  // every == 0 and the saved maps have the kernels' own layout
};

// One convolution's weights, ready for use.
struct Bank {
  float* weights;
  float* scale;
  float* bias;
};

struct Scratch {
  float* zeros;          // one pixel of zeros, what lies outside the map
  Bank bank[2];          // of a block's two convolutions: each is packed while the other one is in use
  float* stream;         // h, or dh
  float* hidden;         // a, or da
  float* saved_stream;   // backward: h_b where the saved map cannot be read in place; one per recomputed block
  float* saved_hidden;   // backward: a_b likewise
  float* gradient[2];    // banks of the weight gradient, one per slice
  float* bias_gradient[2];
  float* worker;         // private to a worker, `worker_stride` floats each
  int64_t worker_stride;
};

struct StageForward {
  Geometry geometry;
  ExternalMap x, y;
  Parameter v, g, bias;
  float skip_scale;
  bool round_operands;  // operands of the convolutions are bfloat16
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

}  // namespace wnfused::cpu

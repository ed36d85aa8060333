// Memory of convolutions, of layers and of stages alike: the caller's and the kernels' own.
//
// Layouts (C is padded to Cp, a multiple of 16 channels, by zeros):
//   map      [N, H, W, Cp] fp32           inputs, outputs and their gradients: no border, a gather supplies the zeros
//   bank     [planes][Op/16][Cp][16]      one convolution's packed weights, or with a plane a tap the gradient of them,
//                                         fp32: plane (tap, or Winograd position), output block, input channel, output
//                                         lane
#pragma once

#include <cstdint>

#include "cpu/vec/lanes.h"

namespace wnfused::cpu {

// A tensor [N, C, H, W] of the caller in any strides, levels of rows being rows, or a parameter in its own order.
struct ExternalMap {
  void* data;
  bool bfloat16;
  int64_t image_stride, channel_stride, row_stride, column_stride;

  // The same map from entry `offset` on.
  ExternalMap from(int64_t offset) const {
    ExternalMap rest = *this;
    rest.data = static_cast<char*>(data) + offset * (bfloat16 ? 2 : 4);
    return rest;
  }
};

struct Parameter {
  void* data;
  bool bfloat16;
  // v and dv: a row is [taps][C], channels_last, not [C][taps]; then fp32, but for pairs, and for the float kernels of
  // conv3x3/ C a multiple of 16, or groups that share a block.
  bool taps_first = false;
  // dv: it and all that is written beside it leave the caches before anyone reads it, so stores pass them by.
  bool past_caches = false;
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

}  // namespace wnfused::cpu

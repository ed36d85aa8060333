// A 1x1 convolution of maps in NCHW, whose images are matrices [C, pixels] as they lie: products of v with each
// (gemm.h).
//
//              product            wide, lanes are     narrow, rows are    depth          an item
//   forward    y  = w x           pixels              outputs             C              pixels, rows of v
//   dx         dx = w^T dz        pixels              inputs              outputs        pixels, inputs
//   dw         dw = sum dz x^T    inputs, transposed  outputs             pixels         rows of v, inputs; then dv, dg
//
// Nothing of x, dz, y or dx is turned, as it is where kernels have channels for lanes, and v is copied once for each
// group of pixels, 16 blocks of 16 lanes. A block at the end of an image begins the next one, too.
//
// v is scaled where it is packed. The order of every sum depends on the shape alone.
#pragma once

#include <atomic>

#include "cpu/linear/linear_layer.h"

namespace wnfused::cpu {

struct PlanesShape {
  int64_t images, inputs, outputs, pixels;

  int64_t blocks() const { return divide_up(images * pixels, kLanes); }  // of pixels
};

// Fewer pixels, and a block could have those of three images.
constexpr int64_t kLeastPlane = kLanes - 1;

// A block of lanes: `first` pixels of an image from `at` on, then the next one's up to `count`.
struct PixelBlock {
  int64_t image, at, first, count;

  PixelBlock(const PlanesShape& shape, int64_t block)
      : image(block * kLanes / shape.pixels),
        at(block * kLanes % shape.pixels),
        first(std::min<int64_t>(kLanes, shape.pixels - at)),
        count(std::min<int64_t>(kLanes, shape.images * shape.pixels - block * kLanes)) {}
};

// How the pixels of all images follow each other along the depth of dw: a few images at a time, or part of one.
struct PixelDepth {
  explicit PixelDepth(const PlanesShape& shape)
      : images(std::max<int64_t>(1, (kDepthChunk - kLanes + 1) / std::max<int64_t>(shape.pixels, 1))),
        pieces(divide_up(shape.pixels, kDepthChunk)),
        length(round_up(divide_up(shape.pixels, std::max<int64_t>(pieces, 1)), pieces > 1 ? kLanes : 1)),
        chunks(pieces > 1 ? shape.images * pieces : divide_up(shape.images, images)) {
    if (pieces > 1) images = 1;
  }

  int64_t images, pieces;  // of a chunk, of an image: one of the two is 1
  int64_t length, chunks;  // of a piece, the last one of an image perhaps less

  int64_t units() const { return images * length; }  // of a chunk, at most
};

struct PlanesForward {
  PlanesShape shape;
  const float *x, *v, *residual;  // residual may be null
  float* y;
  const float *gain, *bias;  // bias may be null
  float* norm;
  Activation activation;
  float slope;
  Cut groups, row_blocks;  // an item has one of each: blocks of pixels, rows of v
  LinearMemory memory;
};

// dx, or dv and dgain, may be null.
struct PlanesBackward {
  PlanesShape shape;
  const float *x, *v, *dz;
  float *dx, *dv;
  const float *gain, *norm, *scale;
  float* dgain;
  Cut groups, input_blocks;  // an item of dx has one of each
  Cut row_blocks, columns;   // an item of dw has one of each: rows of v, blocks of inputs
  LinearMemory memory;
  float *inputs, *dw;  // x packed for dw, and its rows, of all workers
};

struct PlanesKernels {
  void (*forward)(const PlanesForward&, Worker&);
  void (*backward)(const PlanesBackward&, Worker&);
};

namespace avx512 {
extern const PlanesKernels planes_kernels;
}
namespace avx2 {
extern const PlanesKernels planes_kernels;
}

// Those of the instruction set in use; null where the vendor's convolutions do better.
const PlanesKernels* planes_kernels();

}  // namespace wnfused::cpu

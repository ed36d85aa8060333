// A weight-normalised single layer, as its ops hand it to the kernels of an instruction set.
//
//      y = act(s * z + b + residual),    z = op(x, v),    s_i = g_i / ||v_i||
//
//      v  [rows][inner]     a row is one run of memory, whose entries are in any order that v and dw share
//      z  [P][C]            "columns": a linear layer, or channels_last with P = N H W; s and b run along a line
//      z  [N * C][H W]      "planes": NCHW; s and b are one number a line
//
// Where no kernel of this library takes the products z, dx and dw (linear_routes.h, conv_layer.h), the vendor's do.
// Then the steps around the products are ours, each a single pass:
//
//      norms / scaled       read v            (write w)       before the product
//      epilogue             read and write z                  in the place of eager's bias and ReLU passes
//      mask                 read dy, y, write dz, s dz        and the bias gradient on the way
//      gradient             read dw, v, write dv              dv may be dw's own memory
//
// One gradient serves both products of the backward: with s dz in the place of dz, dx = (s dz) v needs no scaled
// weight, and the product with x gives s dw, from which dv = s dw - v <s dw, v> / ||v||^2 needs no scale and dg = <s
// dw, v> / (s ||v||) only one division. Rows whose s is 0 or extreme would lose dg that way: then dz is kept beside s
// dz.
//
// Scaling after the product keeps v as it is, but not its range: with x of 1e25 and a norm of 1e15 the product
// overflows where y would not. Such a call is noticed and taken again with the scaled weight (can_wait below).
//
// So v, which is all that a wide layer with a small batch consists of, is read once more than by an un-normalised
// layer, and from cache where the product takes it in slices (linear_vendor.cpp).
#pragma once

#include <cstdint>

#include "activation_number.h"
#include "cpu/layer/norm.h"
#include "cpu/vec/lanes.h"

namespace wnfused::cpu {

// Lines [begin, end) of z, and the s and b that go with them. `columns` tells how they lie, see above.
struct Lines {
  bool columns;
  int64_t begin, end, length;
  int64_t channels;
};

// Rows of v and what belongs to them.
struct RowRange {
  int64_t begin, end, inner;
};

// taps: 1 where dw's rows are in v's order; else they list [taps][channels] while v's list [channels][taps], and
// `scratch` is room for a row of dw. dv may be dw's own memory either way. `scaled`: dw holds s dw.
struct RowGradient {
  Values dw, v, dv;
  const float *gain, *norm;
  float* dgain;
  bool scaled;
  int64_t taps;
  void* scratch;
};

struct Epilogue {
  Values z, residual;
  const float *scale, *bias;  // null: z is scaled, and has its bias, already; whether it is finite is not asked then
  Activation activation;
  float slope;
};

struct Mask {
  Values dy, y, dz, scaled;  // dz and scaled are written where there is memory for them
  const float* scale;
  float* bias_gradient;  // columns: one number a channel, added to; planes: one number a line
  Activation activation;
  float slope;
};

constexpr int kSmallRows = 32;  // of x: what the small kernels can take
constexpr int kSmallTile = 8;   // rows of v that their backward takes at once

// x: floats; or in pairs, as v, where the kernel takes products of pairs.
struct SmallLinear {
  int64_t rows, inner, features;  // of x; of x and v; of v
  Values x, v;
  const float *gain, *bias, *residual;
  Values y;
  float* norm;
  Activation activation;
  float slope;
};

// dx: of one share of the rows of v, added to; dx or dv may be null. `scratch`: room for kSmallTile rows of dw beside a
// bfloat16 dv; a float dv is its own room.
struct SmallLinearBackward {
  int64_t rows, inner, features;
  const float* x;
  Values v;
  const float *gain, *norm, *dz;
  float* dx;
  Values dv;
  float *dgain, *scratch;
};

// Whether g / ||v|| can wait until after the product. A small one lets unscaled sums overflow, which is detected,
// because they are not finite then; a large one lets them underflow, which is not, hence the limit.
inline bool can_wait(float scale) {
  constexpr float kLargest = 1 << 12;
  return -kLargest <= scale && scale <= kLargest;
}

// The passes that scale a finished product return whether all of it is finite and, where they take the norm, can_wait:
// if not, the product has to be taken again with the scaled weight, which has the range of an un-normalised layer.
struct LayerKernels {
  void (*norms)(const RowRange&, Values v, float* norm);
  void (*scaled)(const RowRange&, Values v, const float* gain, float* norm, Values w);
  void (*gradient)(const RowRange&, const RowGradient&);
  bool (*epilogue)(const Lines&, const Epilogue&);
  void (*mask)(const Lines&, const Mask&);
  bool (*small_linear)(const SmallLinear&, int64_t begin, int64_t end);
  void (*small_linear_backward)(const SmallLinearBackward&, int64_t begin, int64_t end);
  NormKernels<float, float> norms_of_floats;
  NormKernels<uint16_t, float> norms_of_bfloat16;
  NormKernels<double, double> norms_of_doubles;
};

namespace avx512 {
extern const LayerKernels layer_kernels;
}
namespace avx2 {
extern const LayerKernels layer_kernels;
}
namespace portable {
extern const LayerKernels layer_kernels;
}

// Those of the instruction set in use.
const LayerKernels& layer_kernels();

}  // namespace wnfused::cpu

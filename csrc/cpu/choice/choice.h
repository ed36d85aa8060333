// Who multiplies a convolution, y = act(s conv(x, v) + b + residual), forward and backward. This is the one place that
// chooses; every bound in this folder was measured (bench/NOTES.md). Asked in this order:
//
//      planes     1x1 layers of maps in NCHW, as products of v with each image (ops/conv_planes.cpp)
//      strips     few channels on a side, or in a group: vectorised over pixels (ops/strip_layer.h)
//      unfolded   a linear layer whose rows are the windows of the map: wide layers on few pixels (ops/unfolding.h)
//      own        the kernels of conv_layer/, by one of their methods
//      vendor     the vendor's convolution, ours being the norm and the passes beside it: 1 to 3 dims
//
// The first two take float32; the next two, bfloat16, too, which they multiply as float32 or as pairs (pair_layer.h). A
// transposed layer has no planes. Layers that are normalised along another dim than their rows are composed in
// wnfused/backends/native_composed.py, and their weight is then `plain`.
#pragma once

#include "cpu/conv3x3/geometry.h"
#include "cpu/window/window.h"
#include "needs.h"

namespace wnfused::cpu {

// A layer as the rules see it.
struct ConvTraits {
  ConvShape shape;  // of a transposed layer, the convolution whose data gradient it is
  bool transposed;
  int64_t dims;   // of the window
  bool last;      // y and dx are in channels_last
  bool rows;      // x lies as rows, a pixel's channels side by side
  bool bfloat16;  // so is x; else all is float32
  bool plain;     // v is the weight itself

  // Which the kernels of conv_layer/ alone take.
  bool is_plain_conv() const { return plain && !transposed; }

  // The multiplications of one of the layer's products.
  int64_t products() const {
    return shape.output_pixels() * shape.outputs * (shape.inputs / shape.groups) * shape.taps();
  }
};

// passes: an activation or a residual follows; kept: the weights are packed for many calls (kept_banks.h).
struct ForwardAsks {
  bool passes, kept;
};

enum class ConvWay { kVendor, kPlanes, kStrips, kUnfolded, kOwn };

struct ConvChoice {
  ConvWay way = ConvWay::kVendor;
  Method method = Method::kDirect;  // of kOwn
  bool keeps = false;               // its bank, a forward of kOwn
};

// Up to so many pixels of an output, of a transposed layer of its input, are rows of a linear layer in every case.
constexpr int64_t kFewestPixels = 8;

ConvChoice choose_forward(const ConvTraits& layer, const ForwardAsks& asks);
ConvChoice choose_backward(const ConvTraits& layer, const Needs& needs);

}  // namespace wnfused::cpu

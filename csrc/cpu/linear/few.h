// Linear layers of floats whose v is a few rows, or a few columns: heads of one to four features; layers of one to four
// inputs, as coordinates are. Of their operands one side is so short that no product is worth packing or turning: x, dy
// and y are read once, dx and dz written once, and what belongs to v stays in L1.
//
//      few features (few_features.h)    lanes are inputs                       forward and backward
//      few inputs (few_inputs.h)        lanes are features, v is turned        backward; forward they are panels
#pragma once

#include <cstdint>

#include "activation_number.h"

namespace wnfused::cpu {

constexpr int64_t kFew = 4;

// y = act(scale (x v^T) + bias + residual): v [features, inner], all else by rows.
struct FewForward {
  int64_t inner, features;
  const float *x, *v, *scale, *bias, *residual;  // bias and residual may be null
  float* y;
  Activation activation;
  float slope;
};

// dz = act'(y) dy, dx = dz (scale v), and dw = dz^T x and dbias, which are added to. dx, dz, dw and dbias may be null.
// Of few inputs `v` is the product scale v, and turned as dw is: [inner, features].
struct FewBackward {
  int64_t inner, features;
  const float *x, *v, *scale, *dy, *y;
  Activation activation;
  float slope;
  float *dx, *dz, *dw, *dbias;
};

// dv, in the place of dw, and dgain of few inputs; v and dw are turned.
struct FewGradient {
  int64_t inner, features;
  const float *v, *scale, *norm;
  float *dw, *dgain;
};

// Of rows [begin, end) of x. The forward says whether all of y is finite.
struct FewKernels {
  bool (*features)(const FewForward&, int64_t begin, int64_t end);
  void (*features_backward)(const FewBackward&, int64_t begin, int64_t end);
  void (*inputs_backward)(const FewBackward&, int64_t begin, int64_t end);
  void (*inputs_gradient)(const FewGradient&);
};

namespace avx512 { extern const FewKernels few_kernels; }
namespace avx2 { extern const FewKernels few_kernels; }
namespace portable { extern const FewKernels few_kernels; }

// Those of the instruction set in use.
const FewKernels& few_kernels();

}  // namespace wnfused::cpu

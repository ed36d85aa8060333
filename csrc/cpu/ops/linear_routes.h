// The ways through a linear layer, y = act(s (x v^T) + b + residual), and what each is handed. run_linear chooses:
//
//      panels     floats: rows as they lie by 16 columns at a time, and nothing else is packed (panel.h)
//      few        floats, of few features or, backward, few inputs: x, dy and y are read once (few.h)
//      small      a handful of rows of x: v is read once (small.h)
//      products   more of them: products of this library, v scaled where it is packed (linear_layer.h)
//      split      on tiles, floats as three bfloat16 each (gemm_tiles.h)
//      pixels     so many that v is packed for them: a 1x1 convolution, x's rows its pixels (conv_layer.h)
//      vendor     the vendor's products, where nothing better is to be had for the processor
#pragma once

#include "cpu/layer/formats.h"
#include "cpu/layer/tensor.h"
#include "cpu/linear/linear_layer.h"

namespace wnfused::cpu {

constexpr int64_t kPanelCost = 6;  // of turning a row of v, in rows of x

struct LinearShape {
  int64_t rows, inner, features;

  bool is_empty() const { return rows == 0 || inner == 0 || features == 0; }

  // Instructions for 16 features of a forward in floats, on vectors of 16: by sums along the rows of v (small.h), which
  // are added up across a vector in the end, or by panels, for which rows are turned. Measured (bench/NOTES.md).
  int64_t summed_work() const { return (rows + 1) * (20 * divide_up(inner, kLanes) + 45); }
  int64_t panel_work() const { return (rows + kPanelCost) * inner; }
};

// y as the passes over it go, row by row.
inline Lines lines_of(const LinearShape& shape) { return {true, 0, shape.rows, shape.features, shape.features}; }

// One call's tensors, dense, and the numbers that go with the rows of v. y and norms are filled.
struct LinearCall {
  LinearShape shape;
  Tensor x, v;
  const float *gain, *bias;  // bias may be null
  std::optional<Tensor> residual;
  Activation activation;
  float slope;
  Tensor y;
  float* norms;

  bool is_half() const { return is_bfloat16(x); }
};

// dx and dv are filled unless they are absent, dgain together with dv. dz is that of a layer without activation.
struct LinearGradient {
  LinearShape shape;
  Tensor x, v;
  const float *gain, *norms;
  std::optional<Tensor> dx, dv;
  float* dgain;

  bool is_half() const { return is_bfloat16(x); }
};

// Those of floats in pieces of bfloat16, where they are the fastest for a layer of that kind, or null.
const LinearKernels* split_products_for(const LinearShape& shape, const Tensor& x);

// The products of this library for such a layer, or null.
const LinearKernels* products_for(const LinearShape& shape, const Tensor& x);

void run_linear(const LinearCall& call);

// From dy and, with an activation, y: what `call` asks for, and dbias unless it is null. Returns dz if it is to be kept
// and is not simply dy.
std::optional<Tensor> run_linear_backward(const LinearGradient& call, const Tensor& dy, const Tensor& y,
                                          Activation activation, float slope, bool keep_dz, float* dbias);

// Whether so few features, or inputs, are fastest by kernels of their own. The forward says whether the range sufficed.
bool are_few(const LinearCall& call);
bool are_few(const LinearGradient& call);
bool linear_by_few(const LinearCall& call);
void linear_by_few_backward(const LinearGradient& call, const Tensor& dy, const Tensor& y, Activation activation,
                            float slope, const std::optional<Tensor>& dz, float* dbias);

// Whether panels are the fastest, beside the small kernels or, without them, beside all others but those of floats in
// pieces. The forward says whether the range sufficed, as small_linear does.
bool are_panels(const LinearCall& call, bool small);
bool linear_by_panels(const LinearCall& call);
bool are_panels(const LinearGradient& call, const LinearKernels* products);
void linear_by_panels_backward(const LinearGradient& call, const Tensor& dz);

// Whether the small kernels are the fastest, with `products` or without.
bool is_small(const LinearCall& call, const LinearKernels* products);
bool is_small(const LinearGradient& call, const LinearKernels* products);

// Whether the range sufficed; if not, y is to be taken another way.
bool small_linear(const LinearCall& call, const LinearKernels* products);
void small_linear_backward(const LinearGradient& call, const Tensor& dz);

// Both return false if a range did not suffice, which only those of floats in pieces have: then nothing of it counts.
bool linear_by_products(const LinearKernels& kernels, const LinearCall& call);
bool linear_by_products_backward(const LinearKernels& kernels, const LinearGradient& call, const Tensor& dz);

// Whether pixels are the fastest, beside `products`.
bool are_pixels(const LinearShape& shape, const Tensor& x, const Tensor& v, const LinearKernels* products,
                bool backward);

// Both return false if they met a value that is not finite: then nothing of it counts. The backward fills dz unless it
// is absent, and dbias together with dv.
bool linear_by_pixels(const LinearCall& call);
bool linear_by_pixels_backward(const LinearGradient& call, const Tensor& dy, const Tensor& y, Activation activation,
                               float slope, const std::optional<Tensor>& dz, float* dbias);

// v as it is, and the scale in the epilogue; if the range did not suffice, once more by the scaled weight.
void vendor_linear(const LinearCall& call);
void vendor_linear_by_weight(const LinearCall& call);

// scaled: s dz, in the place of dz where the scales are `invertible`. At least one of the two is there.
void vendor_linear_backward(const LinearGradient& call, const std::optional<Tensor>& dz,
                            const std::optional<Tensor>& scaled, bool invertible);

}  // namespace wnfused::cpu

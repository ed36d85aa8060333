// The passes of layer.h over whole tensors, on all threads.
#pragma once

#include "cpu/layer/layer.h"
#include "cpu/layer/tensor.h"
#include "cpu/machine/parallel.h"

namespace wnfused::cpu {

inline int64_t row_length(const Tensor& v) { return v.size(0) == 0 ? 0 : v.numel() / v.size(0); }

// The scaled weight in `dtype` beside the norms; s v in one pass.
inline Tensor scaled_weight(const Tensor& v, const float* gain, float* norm, ScalarType dtype) {
  Tensor w = empty_as(v, dtype);
  const Values source = values_of(v), target = values_of(w);
  const int64_t inner = row_length(v);
  for_rows(0, v.size(0), inner, [&](int64_t begin, int64_t end) {
    layer_kernels().scaled({begin, end, inner}, source, gain, norm, target);
  });
  return w;
}

inline void row_norms(const Tensor& v, float* norm, int64_t begin, int64_t end) {
  const Values source = values_of(v);
  const int64_t inner = row_length(v);
  for_rows(begin, end, inner, [&](int64_t first, int64_t last) {
    layer_kernels().norms({first, last, inner}, source, norm);
  });
}

// Runs the epilogue over all lines of z; whether all of it is finite.
bool run_epilogue(const Lines& lines, const Epilogue& task);

// Runs the mask pass over all lines and folds the bias gradient, in an order that the shape alone decides.
void run_mask(const Lines& lines, const Mask& task, float* bias_gradient);

// dz = act'(y) dy, in `into` where that is given, and unless dbias is null the bias gradient in that; without an
// activation dy itself.
Tensor masked_gradient(const Tensor& dy, const Tensor& y, const std::optional<Tensor>& into, Activation activation,
                       float slope, float* dbias);

}  // namespace wnfused::cpu

// What layers ask of their arguments; the words that a user reads are Python's.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "activation_number.h"
#include "cpu/layer/tensor.h"

namespace wnfused::cpu {

// What every layer asks of its tensors. The types: float throughout, or x in bfloat16 with each parameter in either.
// The shapes: g one number a row, flat or in v's dims; bias one number a row.
inline void check_parameters(const Tensor& x, const Tensor& v, const Tensor& g, const std::optional<Tensor>& bias) {
  const bool half = is_bfloat16(x);
  const auto known = [&](const Tensor& t) {
    const ScalarType type = t.scalar_type();
    return type == ScalarType::Float || (half && type == ScalarType::BFloat16);
  };
  STD_TORCH_CHECK(known(x), "layer: x must be float32 or bfloat16");
  STD_TORCH_CHECK(known(v) && known(g), "layer: parameters must have the dtype of x, or float32");
  const int64_t rows = v.size(0);
  STD_TORCH_CHECK((g.dim() == 1 || g.dim() == v.dim()) && g.numel() == rows && g.size(0) == rows,
                  "layer: g does not have one entry for each of ", rows, " rows");
  STD_TORCH_CHECK(!bias || (known(*bias) && bias->dim() == 1 && bias->size(0) == rows),
                  "layer: bias must have the dtype of x, or float32, and ", rows, " entries");
}

inline void check_activation(int64_t activation, double slope) {
  STD_TORCH_CHECK(activation == Activation::kNone || activation == Activation::kRelu ||
                      (activation == Activation::kLeakyRelu && (slope >= 0 && std::isfinite(slope))),
                  "layer: activation ", activation, " with negative_slope ", slope);
}

inline void check_residual_dtype(const std::optional<Tensor>& residual, const Tensor& x) {
  STD_TORCH_CHECK(!residual || residual->scalar_type() == x.scalar_type(), "layer: residual must have the dtype of x");
}

// A residual has the type and shape of the output.
inline void check_residual(const std::optional<Tensor>& residual, const Tensor& y) {
  STD_TORCH_CHECK(!residual || (residual->scalar_type() == y.scalar_type() && residual->dim() == y.dim() &&
                                std::equal(y.sizes().begin(), y.sizes().end(), residual->sizes().begin())),
                  "layer: residual must have the dtype and shape of the output");
}

inline void check_norm(const Tensor& norm, int64_t rows) {
  STD_TORCH_CHECK(norm.scalar_type() == ScalarType::Float && norm.is_contiguous() && norm.numel() == rows,
                  "layer: norm must be float32 with ", rows, " entries");
}

// A gradient, or an output, of such sizes.
inline void check_gradient(const Tensor& t, const char* name, const std::vector<int64_t>& sizes, const Tensor& x) {
  const bool fits = std::equal(t.sizes().begin(), t.sizes().end(), sizes.begin(), sizes.end());
  STD_TORCH_CHECK(fits && t.scalar_type() == x.scalar_type(), "layer: ", name,
                  " must have the dtype of x and the shape of the output");
}

}  // namespace wnfused::cpu

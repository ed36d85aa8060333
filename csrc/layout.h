// How the entries of tensors lie in memory, on any device.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>

namespace wnfused {

using torch::stable::Tensor;

inline bool same_layout(const Tensor& a, const Tensor& b) {
  return std::equal(a.strides().begin(), a.strides().end(), b.strides().begin(), b.strides().end());
}

// v as the kernels read it: rows along dim 0, each one run of memory.
inline bool has_dense_rows(const Tensor& v) {
  if (v.is_contiguous()) return true;
  if (v.dim() < 4 || v.numel() == 0 || v.stride(1) != 1) return false;
  int64_t entries = v.size(1);
  for (int64_t d = v.dim() - 1; d > 1; entries *= v.size(d--))
    if (v.stride(d) != entries) return false;
  return v.stride(0) == entries;
}

}  // namespace wnfused

// Tensors as the layer ops handle them: memory and views, and the vendor's products, without a trip through the
// dispatcher.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/machine/workspace.h"
#include "cpu/vec/lanes.h"
#include "layout.h"

namespace wnfused::cpu {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline bool is_bfloat16(const Tensor& t) { return t.scalar_type() == ScalarType::BFloat16; }

// Whether the kernels that fuse a layer take it.
inline bool is_fused_dtype(const Tensor& t) { return is_bfloat16(t) || t.scalar_type() == ScalarType::Float; }

template <class T>
const T* entries(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

inline Values values_of(const Tensor& t) { return {const_cast<void*>(t.const_data_ptr()), is_bfloat16(t)}; }

// What a layer hands out, which its user may keep. Below 16 MB maps are found in a cache where the allocator hands out
// what was freed last; from there on fresh pages cost more.
inline Tensor empty_strided_map(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                                ScalarType dtype) {
  constexpr Recycled kLargeMaps{int64_t{1} << 22, 4};
  return recycled_empty(sizes, strides, dtype, kLargeMaps);
}

inline Tensor empty(const std::vector<int64_t>& sizes, ScalarType dtype) {
  return empty_strided_map(sizes, contiguous_strides(sizes), dtype);
}

// The sizes and strides of a dense tensor, in another dtype if need be: gradients and scratch, whose memory is kept for
// the next call.
inline Tensor empty_as(const Tensor& t, ScalarType dtype) { return recycled_empty(t.sizes(), t.strides(), dtype); }

inline Tensor empty_as(const Tensor& t) { return empty_as(t, t.scalar_type()); }

// A matrix in the memory of `t`, `offset` entries after its first (the shim counts from there, not from the storage).
inline Tensor matrix(const Tensor& t, int64_t offset, int64_t rows, int64_t columns, int64_t row_stride,
                     int64_t column_stride) {
  const int64_t sizes[] = {rows, columns}, strides[] = {row_stride, column_stride};
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(t.get(), 2, sizes, strides, offset, &made));
  return Tensor(made);
}

// A map. Formats are those that torch gives outputs and gradients.
inline Tensor empty_map(const std::vector<int64_t>& sizes, bool channels_last, ScalarType dtype) {
  if (!channels_last) return empty(sizes, dtype);
  std::vector<int64_t> strides(sizes.size(), 1);
  int64_t entries = sizes[1];
  for (size_t d = sizes.size(); d-- > 2; entries *= sizes[d]) strides[d] = entries;
  strides[0] = entries;
  return empty_strided_map(sizes, strides, dtype);
}

// The whole memory of a dense tensor, with the sizes and strides of another.
inline Tensor viewed_as(const Tensor& t, const Tensor& like) {
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      t.get(), like.dim(), like.sizes().data(), like.strides().data(), 0, &made));
  return Tensor(made);
}

// The same entries by other strides.
inline Tensor with_strides(const Tensor& t, const std::vector<int64_t>& strides) {
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(t.get(), t.dim(), t.sizes().data(), strides.data(), 0, &made));
  return Tensor(made);
}

// A tensor in the layout of `like`, copied only where it has another.
inline Tensor laid_out_as(const Tensor& t, const Tensor& like) {
  if (same_layout(t, like)) return t;
  Tensor copy = empty_as(like, t.scalar_type());
  torch::stable::copy_(copy, t);
  return copy;
}

// A tensor in that dtype, copied only where it has another.
inline Tensor as_dtype(const Tensor& t, ScalarType dtype) {
  return t.scalar_type() == dtype ? t : torch::stable::to(t, dtype);
}

inline void mm(const Tensor& out, const Tensor& a, const Tensor& b) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out.get(), a.get(), b.get()));
}

// out = added + a b; `added` may be out itself, or a row that is added to each.
inline void addmm(const Tensor& out, const Tensor& added, const Tensor& a, const Tensor& b) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), added.get(), a.get(), b.get(), 1.0, 1.0));
}

inline std::vector<int64_t> sizes_of(const Tensor& t) { return {t.sizes().begin(), t.sizes().end()}; }

}  // namespace wnfused::cpu

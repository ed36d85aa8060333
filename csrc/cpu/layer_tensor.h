// Tensors as the layer ops handle them: memory and views without a trip through the dispatcher, the vendor's products.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "layer.h"
#include "workspace.h"

namespace wnfused::cpu {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kRecycled = int64_t{1} << 18;  // entries from which memory is worth keeping
constexpr int64_t kGrain = 32768;  // entries below which a second thread costs more than it brings

inline bool is_bfloat16(const Tensor& t) { return t.scalar_type() == ScalarType::BFloat16; }

inline Values values_of(const Tensor& t) { return {const_cast<void*>(t.const_data_ptr()), is_bfloat16(t)}; }

inline Tensor empty_strided(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, ScalarType dtype) {
  const int32_t type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), type, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

inline Tensor empty(const std::vector<int64_t>& sizes, ScalarType dtype) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);
  return empty_strided(sizes, strides, dtype);
}

// The sizes and strides of a dense tensor, in another dtype if need be: gradients and scratch, whose memory is kept for
// the next call. The pages of a fresh one cost a wide layer with a small batch several times its arithmetic.
inline Tensor empty_as(const Tensor& t, ScalarType dtype) {
  if (t.numel() >= kRecycled && t.is_contiguous()) return recycled_empty(t.sizes(), dtype);
  return empty_strided({t.sizes().begin(), t.sizes().end()}, {t.strides().begin(), t.strides().end()}, dtype);
}

inline Tensor empty_as(const Tensor& t) { return empty_as(t, t.scalar_type()); }

inline Tensor nothing(const Tensor& like) { return empty({0}, like.scalar_type()); }

// A matrix in the memory of `t`, `offset` entries after its first (the shim counts from there, not from the storage).
inline Tensor matrix(const Tensor& t, int64_t offset, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride) {
  const int64_t sizes[] = {rows, columns}, strides[] = {row_stride, column_stride};
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(t.get(), 2, sizes, strides, offset, &made));
  return Tensor(made);
}

// The whole memory of a dense tensor, with the sizes and strides of another.
inline Tensor viewed_as(const Tensor& t, const Tensor& like) {
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      t.get(), like.dim(), like.sizes().data(), like.strides().data(), 0, &made));
  return Tensor(made);
}

inline void mm(const Tensor& out, const Tensor& a, const Tensor& b) {
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out.get(), a.get(), b.get()));
}

// out = added + a b; `added` may be out itself, or a row that is added to each.
inline void addmm(const Tensor& out, const Tensor& added, const Tensor& a, const Tensor& b) {
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), added.get(), a.get(), b.get(), 1.0, 1.0));
}

// The types that the kernels know: float throughout, or x in bfloat16 with each parameter in either.
inline void check_parameters(const Tensor& x, const Tensor& v, const Tensor& g) {
  const auto known = [&](const Tensor& t) {
    return t.scalar_type() == ScalarType::Float || (is_bfloat16(x) && is_bfloat16(t));
  };
  STD_TORCH_CHECK(known(x) || is_bfloat16(x), "layer: x must be float32 or bfloat16");
  STD_TORCH_CHECK(known(v) && known(g), "layer: parameters must have the dtype of x, or float32");
  STD_TORCH_CHECK(g.numel() == v.size(0), "layer: g has ", g.numel(), " entries for ", v.size(0), " rows");
}

// One number a row or channel as floats: in place where it is float already, else converted into `held`.
inline const float* floats_of(const Tensor& t, std::vector<float>& held) {
  if (!is_bfloat16(t) && t.is_contiguous()) return static_cast<const float*>(t.const_data_ptr());
  const Tensor wide = torch::stable::contiguous(torch::stable::to(t, ScalarType::Float));
  const float* source = static_cast<const float*>(wide.const_data_ptr());
  held.assign(source, source + t.numel());
  return held.data();
}

// g / ||v|| a row; 0 for a zero row.
inline std::vector<float> scales_of(const float* gain, const float* norm, int64_t rows) {
  std::vector<float> scale(rows);
  for (int64_t r = 0; r < rows; ++r) scale[r] = norm[r] == 0 ? 0.0f : gain[r] / norm[r];
  return scale;
}

// Whether s dz can stand for dz: no gain of a row that is not zero is lost in its scale, or in under- or overflow.
inline bool are_invertible(const std::vector<float>& scale, const float* norm) {
  constexpr float kLargest = 1 << 24;
  for (size_t r = 0; r < scale.size(); ++r) {
    const float size = scale[r] < 0 ? -scale[r] : scale[r];
    if (norm[r] != 0 && !(size <= kLargest && size * kLargest >= 1)) return false;
  }
  return true;
}

// run(begin, end) over rows of `length` entries, on so many threads as their number is worth.
template <class Run>
void for_rows(int64_t begin, int64_t end, int64_t length, const Run& run) {
  const int64_t grain = std::max<int64_t>(kGrain / std::max<int64_t>(length, 1), 1);
  if (end - begin <= grain) {
    if (begin < end) run(begin, end);
  } else {
    torch::stable::parallel_for(begin, end, grain, run);
  }
}

// v as the kernels read it: rows along dim 0, each one run of memory.
inline bool has_dense_rows(const Tensor& v) {
  if (v.is_contiguous()) return true;
  if (v.dim() != 4 || v.numel() == 0) return false;
  const int64_t channels = v.size(1), width = v.size(3);
  return v.stride(1) == 1 && v.stride(3) == channels && v.stride(2) == channels * width &&
         v.stride(0) == channels * width * v.size(2);
}

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

// Runs the epilogue over all lines of z.
void run_epilogue(const Lines& lines, const Epilogue& task);

// Runs the mask pass over all lines and folds the bias gradient, in an order that the shape alone decides.
void run_mask(const Lines& lines, const Mask& task, float* bias_gradient);

}  // namespace wnfused::cpu

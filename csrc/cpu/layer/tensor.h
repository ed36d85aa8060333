// Tensors as the layer ops handle them: memory and views without a trip through the dispatcher, the vendor's products.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <vector>

#include "cpu/layer/layer.h"
#include "cpu/machine/parallel.h"
#include "cpu/machine/workspace.h"

namespace wnfused::cpu {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kRecycled = int64_t{1} << 18;  // entries from which memory is worth keeping

inline bool is_bfloat16(const Tensor& t) { return t.scalar_type() == ScalarType::BFloat16; }

template <class T>
const T* entries(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

inline Values values_of(const Tensor& t) { return {const_cast<void*>(t.const_data_ptr()), is_bfloat16(t)}; }

inline Tensor empty_strided(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, ScalarType dtype) {
  const int32_t type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
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
  const bool kept = dtype == ScalarType::Float || dtype == ScalarType::BFloat16;
  if (kept && t.numel() >= kRecycled && t.is_contiguous()) return recycled_empty(t.sizes(), dtype);
  return empty_strided({t.sizes().begin(), t.sizes().end()}, {t.strides().begin(), t.strides().end()}, dtype);
}

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

// A float32 map. Formats are those that torch gives outputs and gradients.
inline Tensor empty_map(const std::vector<int64_t>& sizes, bool channels_last) {
  if (!channels_last) return empty(sizes, ScalarType::Float);
  std::vector<int64_t> strides(sizes.size(), 1);
  int64_t entries = sizes[1];
  for (size_t d = sizes.size(); d-- > 2; entries *= sizes[d]) strides[d] = entries;
  strides[0] = entries;
  return empty_strided(sizes, strides, ScalarType::Float);
}

// The whole memory of a dense tensor, with the sizes and strides of another.
inline Tensor viewed_as(const Tensor& t, const Tensor& like) {
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      t.get(), like.dim(), like.sizes().data(), like.strides().data(), 0, &made));
  return Tensor(made);
}

inline bool same_layout(const Tensor& a, const Tensor& b) {
  return std::equal(a.strides().begin(), a.strides().end(), b.strides().begin(), b.strides().end());
}

// A tensor in the layout of `like`, copied only where it has another.
inline Tensor laid_out_as(const Tensor& t, const Tensor& like) {
  if (same_layout(t, like)) return t;
  Tensor copy = empty_as(like, t.scalar_type());
  torch::stable::copy_(copy, t);
  return copy;
}

inline void mm(const Tensor& out, const Tensor& a, const Tensor& b) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out.get(), a.get(), b.get()));
}

// out = added + a b; `added` may be out itself, or a row that is added to each.
inline void addmm(const Tensor& out, const Tensor& added, const Tensor& a, const Tensor& b) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), added.get(), a.get(), b.get(), 1.0, 1.0));
}

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
  STD_TORCH_CHECK(activation >= 0 && activation <= 2 && (activation != 2 || (slope >= 0 && std::isfinite(slope))),
                  "layer: activation ", activation, " with negative_slope ", slope);
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
inline void check_gradient(const Tensor& t, const char* name, const std::vector<int64_t>& sizes) {
  const bool fits = std::equal(t.sizes().begin(), t.sizes().end(), sizes.begin(), sizes.end());
  STD_TORCH_CHECK(fits && t.scalar_type() == ScalarType::Float, "layer: ", name, " must be float32 of the output's shape");
}

inline float widened(uint16_t bfloat16) {
  const uint32_t bits = static_cast<uint32_t>(bfloat16) << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint16_t narrowed(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  if (value != value) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// All entries as floats: in place where they are that already, else in `held`.
inline const float* floats_of(const Tensor& t, std::vector<float>& held) {
  if (!t.is_contiguous()) {
    const Tensor dense = torch::stable::contiguous(t);
    const int64_t count = dense.numel();
    held.resize(count);
    if (is_bfloat16(t)) std::transform(entries<uint16_t>(dense), entries<uint16_t>(dense) + count, held.begin(), widened);
    else std::copy_n(entries<float>(dense), count, held.begin());
    return held.data();
  }
  if (!is_bfloat16(t)) return entries<float>(t);
  held.resize(t.numel());
  std::transform(entries<uint16_t>(t), entries<uint16_t>(t) + held.size(), held.begin(), widened);
  return held.data();
}

// A tensor, the gradient of gains say, that is computed in floats and handed out in a dtype of its own.
class Rounded {
 public:
  explicit Rounded(const Tensor& tensor) : tensor_(tensor) {
    if (is_bfloat16(tensor)) held_.resize(tensor.numel());
  }
  Rounded(const std::vector<int64_t>& sizes, ScalarType dtype) : Rounded(empty(sizes, dtype)) {}

  float* data() { return is_bfloat16(tensor_) ? held_.data() : static_cast<float*>(tensor_.mutable_data_ptr()); }

  void round() {
    std::transform(held_.begin(), held_.end(), static_cast<uint16_t*>(tensor_.mutable_data_ptr()), narrowed);
  }

  const Tensor& tensor() {
    round();
    return tensor_;
  }

 private:
  Tensor tensor_;
  std::vector<float> held_;
};

inline std::vector<int64_t> sizes_of(const Tensor& t) { return {t.sizes().begin(), t.sizes().end()}; }

// g / ||v|| a row; 0 for a zero row.
inline std::vector<float> scales_of(const float* gain, const float* norm, int64_t rows) {
  std::vector<float> scale(rows);
  for (int64_t r = 0; r < rows; ++r) scale[r] = norm[r] == 0 ? 0.0f : gain[r] / norm[r];
  return scale;
}

inline bool all_can_wait(const std::vector<float>& scale) { return std::all_of(scale.begin(), scale.end(), can_wait); }

// Whether s dz can stand for dz, from which dg comes by division.
inline bool are_invertible(const std::vector<float>& scale, const float* norm) {
  for (size_t r = 0; r < scale.size(); ++r)
    if (norm[r] != 0 && (!can_wait(scale[r]) || !can_wait(1.0f / scale[r]))) return false;
  return true;
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

// torch's rule for the format of a result: strides that grow in the order C, W, H, D, N, be the map dense or not. Where
// sizes of 1 leave both orders open it is NCHW.
inline bool suggests_channels_last(const Tensor& t) {
  if (t.dim() < 4 || t.stride(1) == 0) return false;
  int64_t least = 0;
  for (int64_t i = 0, dims = t.dim(); i < dims; ++i) {
    const int64_t d = i == 0 ? 1 : i == dims - 1 ? 0 : dims - i;
    if (t.size(d) == 0 || t.stride(d) < least || (d == 0 && least == t.stride(1))) return false;
    least = t.stride(d) * std::max<int64_t>(t.size(d), 1);
  }
  return true;
}

// In two dims, or in three.
inline bool is_channels_last(const Tensor& t) { return !t.is_contiguous() && has_dense_rows(t); }

// A map [N, C, spatial] as passes go over it: lines along C, or along the map.
inline Lines lines_of(const Tensor& z) {
  const int64_t channels = z.size(1), entries = z.numel();
  if (entries == 0) return {true, 0, 0, channels, channels};
  if (is_channels_last(z)) return {true, 0, entries / channels, channels, channels};
  const int64_t planes = z.size(0) * channels;
  return {false, 0, planes, entries / planes, channels};
}

// Neither NCHW nor channels_last: the passes work on an NCHW copy.
inline Tensor in_lines(const Tensor& z) {
  return z.is_contiguous() || is_channels_last(z) ? z : torch::stable::contiguous(z);
}

// A map over three dims whose lines, numbered through all levels, lie at equal distances; a copy where they do not.
inline Tensor with_even_lines(const Tensor& t) {
  if (t.dim() < 5 || t.size(2) == 1 || t.size(3) == 1 || t.stride(2) == t.size(3) * t.stride(3)) return t;
  Tensor copy = empty_map(sizes_of(t), suggests_channels_last(t));
  torch::stable::copy_(copy, t);
  return copy;
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

// Runs the epilogue over all lines of z; whether all of it is finite.
bool run_epilogue(const Lines& lines, const Epilogue& task);

// Runs the mask pass over all lines and folds the bias gradient, in an order that the shape alone decides.
void run_mask(const Lines& lines, const Mask& task, float* bias_gradient);

}  // namespace wnfused::cpu

// Numbers a row, gains, biases, norms and scales, as floats whatever the parameters' dtype.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/layer/layer.h"
#include "cpu/layer/tensor.h"

namespace wnfused::cpu {

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
    if (is_bfloat16(t))
      std::transform(entries<uint16_t>(dense), entries<uint16_t>(dense) + count, held.begin(), widened);
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

// g / ||v|| a row; 0 for a zero row, and 1 where there is no g: v is the weight itself.
inline std::vector<float> scales_of(const float* gain, const float* norm, int64_t rows) {
  std::vector<float> scale(rows, 1.0f);
  if (!gain) return scale;
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

}  // namespace wnfused::cpu

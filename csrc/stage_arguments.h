// What memory safety asks of the residual stage's arguments, on any device; the rest is checked in Python. And the
// tensors it returns.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>

namespace wnfused::stage {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline bool is_bfloat16(const Tensor& tensor) { return tensor.scalar_type() == ScalarType::BFloat16; }

inline void check_dtype(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(is_bfloat16(tensor) || tensor.scalar_type() == ScalarType::Float, "residual_stage: ", name,
                  " must be float32 or bfloat16");
}

inline Tensor make_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

struct Parameters {
  Tensor v, g, bias;  // contiguous
};

inline Parameters checked_parameters(const Tensor& x, const Tensor& v, const Tensor& g, const Tensor& bias,
                                     int64_t recompute) {
  STD_TORCH_CHECK(x.dim() == 4, "residual_stage: x must have 4 dimensions");
  STD_TORCH_CHECK(v.dim() == 6 && v.size(1) == 2 && v.size(2) == x.size(1) && v.size(3) == x.size(1) &&
                      v.size(4) == 3 && v.size(5) == 3,
                  "residual_stage: v must be [B, 2, C, C, 3, 3] with x [N, C, H, W]");
  for (const Tensor* tensor : {&g, &bias})
    STD_TORCH_CHECK(tensor->dim() == 3 && tensor->size(0) == v.size(0) && tensor->size(1) == 2 &&
                        tensor->size(2) == x.size(1),
                    "residual_stage: g and bias must be [B, 2, C]");
  STD_TORCH_CHECK(x.size(1) >= 1 && x.size(2) >= 1 && x.size(3) >= 1, "residual_stage: empty channels or maps");
  STD_TORCH_CHECK(recompute >= 0, "residual_stage: recompute must not be negative");
  check_dtype(x, "x");
  check_dtype(v, "v");
  check_dtype(g, "g");
  check_dtype(bias, "bias");
  for (const Tensor* tensor : {&v, &g, &bias})
    STD_TORCH_CHECK(tensor->scalar_type() == ScalarType::Float || tensor->scalar_type() == x.scalar_type(),
                    "residual_stage: v, g and bias must have the dtype of x, or float32");
  return {make_contiguous(v), make_contiguous(g), make_contiguous(bias)};
}

// The maps that a forward saves: [B, 2, N, H, W, C] in the dtype of x, or with recompute = k [ceil(B / k), 1, ..] in
// fp32.
struct SavedShape {
  int64_t sizes[6];
  ScalarType dtype;

  SavedShape(const Tensor& x, int64_t blocks, int64_t recompute)
      : sizes{recompute ? blocks / recompute + (blocks % recompute != 0) : blocks,
              recompute ? 1 : 2,
              x.size(0),
              x.size(2),
              x.size(3),
              x.size(1)},
        dtype(recompute ? ScalarType::Float : x.scalar_type()) {}

  int64_t numel() const {
    int64_t count = 1;
    for (int64_t size : sizes) count *= size;
    return count;
  }
};

inline void check_saved(const Tensor& norm, const Tensor& maps, const Tensor& g, const SavedShape& saved) {
  STD_TORCH_CHECK(norm.scalar_type() == ScalarType::Float && norm.is_contiguous() && norm.numel() == g.numel(),
                  "residual_stage_backward: norm must be the forward's");
  STD_TORCH_CHECK(maps.scalar_type() == saved.dtype && maps.is_contiguous() && maps.numel() == saved.numel(),
                  "residual_stage_backward: maps must be those the forward saved with the same recompute");
}

// Contiguous as channels_last, and not contiguous in the default order (sizes of 1 make some tensors both).
inline bool is_channels_last(const Tensor& x) {
  if (x.is_contiguous()) return false;
  const int64_t order[] = {1, 3, 2, 0};
  int64_t expected = 1;
  for (int64_t dim : order) {
    if (x.size(dim) != 1 && x.stride(dim) != expected) return false;
    expected *= x.size(dim);
  }
  return true;
}

// Of x's shape, dtype, device and, where it is contiguous or channels_last, memory format.
inline Tensor empty_map_like(const Tensor& x) {
  const auto format = is_channels_last(x) ? torch::headeronly::MemoryFormat::ChannelsLast
                                          : torch::headeronly::MemoryFormat::Contiguous;
  return torch::stable::empty(x.sizes(), x.scalar_type(), std::nullopt, x.device(), std::nullopt, format);
}

}  // namespace wnfused::stage

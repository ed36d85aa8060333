// What the ops small_linear_ and small_linear_backward_ have in common.
#pragma once

#include <optional>

#include "cuda/small_linear.h"
#include "cuda/torch.h"

namespace wnfused::gpu {

using Optional = std::optional<Tensor>;

template <class T>
T* pointer(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

template <class T>
T* pointer(const Optional& tensor) {
  return tensor ? pointer<T>(*tensor) : nullptr;
}

// A tensor of these sizes, dense, in one of two dtypes, whose address suits loads of 16 bytes.
inline void check_tensor(const char* op, const char* name, const Tensor& tensor, int64_t rows, int64_t columns,
                         ScalarType dtype, ScalarType other) {
  STD_TORCH_CHECK(tensor.numel() == rows * columns && tensor.is_contiguous(), op, ": ", name,
                  " must be contiguous, with ", rows * columns, " entries");
  STD_TORCH_CHECK(tensor.scalar_type() == dtype || tensor.scalar_type() == other, op, ": wrong dtype of ", name);
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0, op, ": ", name, " must lie at 16 bytes");
}

inline void check_sizes(const char* op, const Tensor& x, const Tensor& v) {
  STD_TORCH_CHECK(x.dim() == 2 && v.dim() == 2 && x.size(1) == v.size(1), op, ": x must have the columns of v");
  STD_TORCH_CHECK(v.size(0) % kSmallRowStep == 0 && v.size(1) % kSmallColumnStep == 0, op,
                  ": v must have a multiple of ", kSmallRowStep, " rows and of ", kSmallColumnStep, " columns, got ",
                  v.size(0), " x ", v.size(1));
  STD_TORCH_CHECK(x.size(0) <= kMostSmallSamples && v.size(0) <= kMostSmallRows && v.size(1) <= kMostSmallColumns, op,
                  ": at most ", kMostSmallSamples, " samples, ", kMostSmallRows, " rows and ", kMostSmallColumns,
                  " columns");
}

// Calls body with the kind of the product, and values of v's type and of x's.
template <class Body>
void typed(const char* op, const Tensor& x, const Tensor& v, bool tf32, const Body& body) {
  const ScalarType narrow = x.scalar_type(), wide = v.scalar_type();
  if (narrow == ScalarType::BFloat16 && wide == ScalarType::Float) return body(Bfloat16{}, float{}, BFloat{});
  if (narrow == ScalarType::BFloat16 && wide == ScalarType::BFloat16) return body(Bfloat16{}, BFloat{}, BFloat{});
  STD_TORCH_CHECK(narrow == ScalarType::Float && wide == ScalarType::Float, op,
                  ": x and v must be float32 or bfloat16, and v not the narrower one");
  if (tf32) return body(Tf32{}, float{}, float{});
  body(Float32{}, float{}, float{});
}

template <class T, class N>
SmallLinearParams<T, N> params_of(const Tensor& x, const Tensor& v, const Tensor& g, const Tensor& norm,
                                  const Optional& bias, bool activates, double slope) {
  SmallLinearParams<T, N> params{};
  params.x = pointer<N>(x);
  params.v = pointer<T>(v);
  params.g = pointer<T>(g);
  params.norm = pointer<float>(norm);
  params.bias_is_float = bias && bias->scalar_type() == ScalarType::Float;
  params.activates = activates;
  params.slope = static_cast<float>(slope);
  params.samples = static_cast<int>(x.size(0));
  params.rows = static_cast<int>(v.size(0));
  params.columns = static_cast<int>(v.size(1));
  return params;
}

}  // namespace wnfused::gpu

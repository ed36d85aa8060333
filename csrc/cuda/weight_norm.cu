// The ops weight_norm and weight_norm_backward on CUDA tensors.
#include "ops.h"

#include <torch/csrc/stable/library.h>

#include "cuda/row_norm.h"
#include "cuda/torch.h"
#include "layout.h"

namespace wnfused::gpu {
namespace {

struct Rows {
  int64_t outer = 1, rows = 1, inner = 1;
};

Rows rows_of(const Tensor& v, int64_t dim) {
  if (dim < 0) return {1, 1, v.numel()};
  STD_TORCH_CHECK(dim < v.dim(), "weight_norm: dim ", dim, " is out of range for a tensor of ", v.dim(), " dims");
  Rows shape;
  for (int64_t d = 0; d < dim; ++d) shape.outer *= v.size(d);
  for (int64_t d = dim + 1; d < v.dim(); ++d) shape.inner *= v.size(d);
  shape.rows = v.size(dim);
  return shape;
}

void check_arguments(const Tensor& g, const Tensor& v, const Rows& shape, int64_t dim) {
  STD_TORCH_CHECK(v.is_contiguous() || (dim <= 0 && has_dense_rows(v)), "weight_norm: v must be dense");
  STD_TORCH_CHECK(g.numel() == shape.rows && g.scalar_type() == v.scalar_type() && g.is_contiguous(),
                  "weight_norm: g must be contiguous, in v's dtype, with ", shape.rows, " entries");
}

template <class T>
T* pointer(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// Enqueues the kernel for the dtype of v. `dw` and `dg` only in the backward, where `w` takes dv.
template <bool kBackward>
void enqueue(const Tensor& v, const Tensor& g, const Tensor* dw, const Tensor& w, const Tensor* dg, const Tensor& norm,
             const Rows& shape) {
  const OnDevice here(v);
  const auto typed = [&](auto value) {
    using T = decltype(value);
    using Wide = typename RowNormParams<T>::Wide;
    const int64_t shares = row_shares(shape.rows, shape.outer * shape.inner);
    Tensor partial;
    if (shares > 1) partial = empty_like_on(v, {shape.rows, shares}, norm.scalar_type());
    const RowNormParams<T> params{pointer<T>(v),
                                  pointer<T>(g),
                                  dw ? pointer<T>(*dw) : nullptr,
                                  pointer<T>(w),
                                  dg ? pointer<T>(*dg) : nullptr,
                                  pointer<Wide>(norm),
                                  shape.outer,
                                  shape.rows,
                                  shape.inner,
                                  shares > 1 ? pointer<Wide>(partial) : nullptr,
                                  shares};
    check(enqueue_row_norm<T, kBackward>(params, here.queue));
  };
  switch (v.scalar_type()) {
    case ScalarType::Float:
      return typed(float{});
    case ScalarType::Double:
      return typed(double{});
    case ScalarType::Half:
      return typed(Half{});
    case ScalarType::BFloat16:
      return typed(BFloat{});
    default:
      STD_TORCH_CHECK(false, "weight_norm: v must be float32, float64, bfloat16 or float16");
  }
}

std::tuple<Tensor, Tensor> weight_norm(const Tensor& v, const Tensor& g, int64_t dim) {
  check_devices("weight_norm", {&v, &g});
  const Rows shape = rows_of(v, dim);
  check_arguments(g, v, shape, dim);
  const ScalarType wide = v.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  Tensor w = torch::stable::empty_like(v);
  Tensor norm = dim < 0 ? empty_like_on(v, {}, wide) : empty_like_on(v, {shape.rows}, wide);
  enqueue<false>(v, g, nullptr, w, nullptr, norm, shape);
  return {w, norm};
}

std::tuple<Tensor, Tensor> weight_norm_backward(const Tensor& dw, const Tensor& v, const Tensor& g, const Tensor& norm,
                                                int64_t dim) {
  check_devices("weight_norm_backward", {&dw, &v, &g, &norm});
  const Rows shape = rows_of(v, dim);
  check_arguments(g, v, shape, dim);
  STD_TORCH_CHECK(dw.numel() == v.numel() && dw.scalar_type() == v.scalar_type() && same_layout(dw, v),
                  "weight_norm_backward: dw must match v");
  const ScalarType wide = v.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  STD_TORCH_CHECK(norm.numel() == shape.rows && norm.is_contiguous() && norm.scalar_type() == wide,
                  "weight_norm_backward: norm must be the forward's");
  Tensor dv = torch::stable::empty_like(v), dg = torch::stable::empty_like(g);
  enqueue<true>(v, g, &dw, dv, &dg, norm, shape);
  return {dv, dg};
}

}  // namespace
}  // namespace wnfused::gpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CUDA, m) {
  m.impl("weight_norm", TORCH_BOX(&wnfused::gpu::weight_norm));
  m.impl("weight_norm_backward", TORCH_BOX(&wnfused::gpu::weight_norm_backward));
}

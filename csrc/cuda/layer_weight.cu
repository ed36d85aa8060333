// The ops layer_weight_ and layer_weight_backward_ on CUDA tensors.
#include "cuda/layer_weight.h"

#include <torch/csrc/stable/library.h>

#include <optional>

#include "cuda/torch.h"
#include "layout.h"

namespace wnfused::gpu {
namespace {

using Optional = std::optional<Tensor>;

// Of a thread's place in a row in 32 bits, with room for one more step.
constexpr int64_t kLongest = (int64_t{1} << 31) - 1024;

template <class T>
T* pointer(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

int64_t length_of(const Tensor& v) { return v.size(0) ? v.numel() / v.size(0) : 0; }

// How many entries of a row of `w` run fastest in another order than that of `v`; all of them where it is the same.
int fastest_of(const Tensor& v, const Tensor& w) {
  const int64_t length = length_of(v);
  if (same_layout(v, w)) return static_cast<int>(length);
  const int64_t channels = v.size(1);
  return static_cast<int>(w.is_contiguous() ? length / channels : channels);
}

void check_rows(const char* op, const Tensor& v, const Tensor& g, const Tensor& w) {
  STD_TORCH_CHECK(v.dim() >= 2 && w.dim() == v.dim(), op, ": v and its weight must have the same 2 dims or more");
  for (int64_t d = 0; d < v.dim(); ++d) STD_TORCH_CHECK(w.size(d) == v.size(d), op, ": the weight must have v's shape");
  STD_TORCH_CHECK(has_dense_rows(v) && has_dense_rows(w), op, ": rows must be dense");
  STD_TORCH_CHECK(length_of(v) <= kLongest, op, ": rows of more than ", kLongest, " entries");
  STD_TORCH_CHECK(g.numel() == v.size(0) && g.is_contiguous() && g.scalar_type() == v.scalar_type(), op,
                  ": g must be contiguous, in v's dtype, with ", v.size(0), " entries");
}

// Calls body with a value of v's type and one of w's.
template <class Body>
void typed(const char* op, ScalarType v, ScalarType w, const Body& body) {
  if (v == ScalarType::Float && w == ScalarType::Float) return body(float{}, float{});
  if (v == ScalarType::Float && w == ScalarType::BFloat16) return body(float{}, BFloat{});
  if (v == ScalarType::Float && w == ScalarType::Half) return body(float{}, Half{});
  if (v == ScalarType::BFloat16 && w == ScalarType::BFloat16) return body(BFloat{}, BFloat{});
  STD_TORCH_CHECK(v == ScalarType::Half && w == ScalarType::Half, op,
                  ": v must be float32, or bfloat16 or float16 as the weight is");
  body(Half{}, Half{});
}

void layer_weight_(const Tensor& v, const Tensor& g, const Optional& bias, const Tensor& w, const Optional& norm,
                   const Optional& bias_out) {
  const char* op = "layer_weight_";
  check_devices(op, {&v, &g, &w, bias ? &*bias : &v, norm ? &*norm : &v, bias_out ? &*bias_out : &v});
  check_rows(op, v, g, w);
  const auto fits = [&](const Tensor& t, ScalarType dtype) {
    return t.numel() == v.size(0) && t.is_contiguous() && t.scalar_type() == dtype;
  };
  STD_TORCH_CHECK(!norm || fits(*norm, ScalarType::Float), op, ": norm must be float32, one entry a row");
  STD_TORCH_CHECK(bias.has_value() == bias_out.has_value() &&
                      (!bias || (fits(*bias, ScalarType::Float) && fits(*bias_out, w.scalar_type()))),
                  op, ": bias must be float32 and bias_out in the weight's dtype, one entry a row");
  if (v.numel() == 0) return;
  const OnDevice here(v);
  typed(op, v.scalar_type(), w.scalar_type(), [&](auto wide, auto narrow) {
    using T = decltype(wide);
    using N = decltype(narrow);
    LayerWeightParams<T, N> params{};
    params.v = pointer<T>(v);
    params.g = pointer<T>(g);
    params.w = pointer<N>(w);
    params.norm = norm ? pointer<float>(*norm) : nullptr;
    params.bias = bias ? pointer<float>(*bias) : nullptr;
    params.bias_out = bias ? pointer<N>(*bias_out) : nullptr;
    params.rows = v.size(0);
    params.length = static_cast<int>(length_of(v));
    params.fastest = fastest_of(v, w);
    check(enqueue_layer_weight<false>(params, here.queue));
  });
}

void layer_weight_backward_(const Tensor& dw, const Tensor& v, const Tensor& g, const Tensor& norm, const Tensor& dv,
                            const Tensor& dg, const Optional& partial, const Optional& dbias) {
  const char* op = "layer_weight_backward_";
  check_devices(op, {&dw, &v, &g, &norm, &dv, &dg, partial ? &*partial : &v, dbias ? &*dbias : &v});
  check_rows(op, v, g, dw);
  STD_TORCH_CHECK(norm.numel() == v.size(0) && norm.is_contiguous() && norm.scalar_type() == ScalarType::Float, op,
                  ": norm must be the forward's");
  STD_TORCH_CHECK(dv.numel() == v.numel() && same_layout(dv, v) && dv.scalar_type() == v.scalar_type() &&
                      dg.numel() == g.numel() && dg.is_contiguous() && dg.scalar_type() == g.scalar_type(),
                  op, ": dv and dg must be as v and g are");
  STD_TORCH_CHECK(partial.has_value() == dbias.has_value() &&
                      (!partial || (partial->dim() == 2 && partial->size(1) == v.size(0) && partial->is_contiguous() &&
                                    partial->scalar_type() == ScalarType::Float && dbias->numel() == v.size(0) &&
                                    dbias->is_contiguous() && dbias->scalar_type() == v.scalar_type())),
                  op, ": partial must be float32, one column a row of v, and dbias as g is");
  if (v.numel() == 0) return;
  const OnDevice here(v);
  typed(op, v.scalar_type(), dw.scalar_type(), [&](auto wide, auto narrow) {
    using T = decltype(wide);
    using N = decltype(narrow);
    LayerWeightParams<T, N> params{};
    params.v = pointer<T>(v);
    params.g = pointer<T>(g);
    params.dw = pointer<N>(dw);
    params.norm = pointer<float>(norm);
    params.dv = pointer<T>(dv);
    params.dg = pointer<T>(dg);
    params.partial = partial ? pointer<float>(*partial) : nullptr;
    params.dbias = dbias ? pointer<T>(*dbias) : nullptr;
    params.shares = partial ? partial->size(0) : 0;
    params.rows = v.size(0);
    params.length = static_cast<int>(length_of(v));
    params.fastest = fastest_of(v, dw);
    check(enqueue_layer_weight<true>(params, here.queue));
  });
}

}  // namespace
}  // namespace wnfused::gpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CUDA, m) {
  m.impl("layer_weight_", TORCH_BOX(&wnfused::gpu::layer_weight_));
  m.impl("layer_weight_backward_", TORCH_BOX(&wnfused::gpu::layer_weight_backward_));
}

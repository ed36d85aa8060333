// The op small_linear_ on CUDA tensors.
#include <torch/csrc/stable/library.h>

#include "cuda/small_linear_forward.h"
#include "cuda/small_linear_op.h"

namespace wnfused::gpu {
namespace {

void small_linear_(const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias, const Optional& residual,
                   const Tensor& y, const Tensor& norm, bool activates, double slope, bool tf32) {
  const char* op = "small_linear_";
  check_devices(op, {&x, &v, &g, bias ? &*bias : &x, residual ? &*residual : &x, &y, &norm});
  check_sizes(op, x, v);
  const int64_t samples = x.size(0), rows = v.size(0);
  const ScalarType narrow = x.scalar_type(), wide = v.scalar_type(), full = ScalarType::Float;
  check_tensor(op, "x", x, samples, x.size(1), narrow, narrow);
  check_tensor(op, "v", v, rows, v.size(1), wide, wide);
  check_tensor(op, "g", g, rows, 1, wide, wide);
  check_tensor(op, "y", y, samples, rows, narrow, narrow);
  check_tensor(op, "norm", norm, rows, 1, full, full);
  if (bias) check_tensor(op, "bias", *bias, rows, 1, narrow, full);
  if (residual) check_tensor(op, "residual", *residual, samples, rows, narrow, narrow);
  if (v.numel() == 0) return;
  const OnDevice here(x);
  typed(op, x, v, tf32, [&](auto kind, auto of_v, auto of_x) {
    using T = decltype(of_v);
    using N = decltype(of_x);
    auto params = params_of<T, N>(x, v, g, norm, bias, activates, slope);
    params.bias = pointer<void>(bias);
    params.residual = pointer<N>(residual);
    params.y = pointer<N>(y);
    check(enqueue_small_linear<decltype(kind)>(params, here.queue));
  });
}

}  // namespace
}  // namespace wnfused::gpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CUDA, m) { m.impl("small_linear_", TORCH_BOX(&wnfused::gpu::small_linear_)); }

// The op small_linear_backward_ on CUDA tensors.
#include <torch/csrc/stable/library.h>

#include "cuda/small_linear_backward.h"
#include "cuda/small_linear_op.h"

namespace wnfused::gpu {
namespace {

// dx, or dv and dg with or without dbias, or all of them.
void small_linear_backward_(const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& v, const Tensor& g,
                            const Tensor& norm, const Optional& dx, const Optional& dv, const Optional& dg,
                            const Optional& dbias, bool activates, double slope, bool tf32) {
  const char* op = "small_linear_backward_";
  check_devices(op, {&x, &dy, &y, &v, &g, &norm, dx ? &*dx : &x, dv ? &*dv : &x, dg ? &*dg : &x, dbias ? &*dbias : &x});
  check_sizes(op, x, v);
  const int64_t samples = x.size(0), rows = v.size(0), columns = v.size(1);
  const ScalarType narrow = x.scalar_type(), wide = v.scalar_type(), full = ScalarType::Float;
  check_tensor(op, "dy", dy, samples, rows, narrow, narrow);
  check_tensor(op, "y", y, samples, rows, narrow, narrow);
  check_tensor(op, "x", x, samples, columns, narrow, narrow);
  check_tensor(op, "v", v, rows, columns, wide, wide);
  check_tensor(op, "g", g, rows, 1, wide, wide);
  check_tensor(op, "norm", norm, rows, 1, full, full);
  STD_TORCH_CHECK(dv.has_value() == dg.has_value() && (dv || !dbias), op, ": dv comes with dg, and dbias with both");
  if (dx) check_tensor(op, "dx", *dx, samples, columns, narrow, narrow);
  if (dv) check_tensor(op, "dv", *dv, rows, columns, wide, wide);
  if (dg) check_tensor(op, "dg", *dg, rows, 1, wide, wide);
  if (dbias) check_tensor(op, "dbias", *dbias, rows, 1, narrow, full);
  if (v.numel() == 0) return;
  const OnDevice here(x);
  typed(op, x, v, tf32, [&](auto kind, auto of_v, auto of_x) {
    using T = decltype(of_v);
    using N = decltype(of_x);
    auto params = params_of<T, N>(x, v, g, norm, dbias, activates, slope);
    params.dy = pointer<N>(dy);
    params.y_read = pointer<N>(y);
    params.dx = pointer<N>(dx);
    params.dv = pointer<T>(dv);
    params.dg = pointer<T>(dg);
    params.dbias = pointer<void>(dbias);
    check(enqueue_small_linear_backward<decltype(kind)>(params, here.queue));
  });
}

}  // namespace
}  // namespace wnfused::gpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CUDA, m) {
  m.impl("small_linear_backward_", TORCH_BOX(&wnfused::gpu::small_linear_backward_));
}

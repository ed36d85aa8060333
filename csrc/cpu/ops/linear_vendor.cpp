// A linear layer on the vendor's products, v taken in slices that stay in cache:
//
//      v [N, K]  | slice | slice | ...      forward    norms of the slice, then its columns of z = x v^T
//                                           backward   dx += (s dz)[:, slice] v[slice]
//                                                      s dw[slice] = (s dz)[:, slice]^T x, which becomes dv in place
//
// so that memory sees v once forward, v and dv once backward: what the un-normalised layer moves. The scale rides in
// the epilogue on z [M, N], backward in the mask pass.
//
// A float32 weight of a bfloat16 x is scaled and rounded in one pass, which is eager's cast; so is a weight whose scale
// cannot wait (layer.h).
#include "cpu/layer/formats.h"
#include "cpu/layer/gains.h"
#include "cpu/layer/passes.h"
#include "cpu/ops/linear_routes.h"

namespace wnfused::cpu {
namespace {

constexpr int64_t kSliceEntries = int64_t{1} << 20;  // 4 MB of v beside as much of dv

// Slices only where v does not fit the cache anyway. With many rows of x the product packs all of x anew for each
// slice, which costs more than a slice that only the last level holds.
int64_t slice_rows(const LinearShape& shape) {
  if (shape.features * shape.inner <= 2 * kSliceEntries) return std::max<int64_t>(shape.features, 1);
  return std::max<int64_t>((shape.rows > 128 ? 8 : 1) * kSliceEntries / shape.inner, 64);
}

bool scale_and_add(const LinearCall& call, const std::vector<float>& scale, const float* bias) {
  const LinearShape& shape = call.shape;
  const std::vector<float> none(bias ? 0 : shape.features, 0.0f);
  return run_epilogue(lines_of(shape),
                      {values_of(call.y), call.residual ? values_of(*call.residual) : Values{nullptr, call.is_half()},
                       scale.data(), bias ? bias : none.data(), call.activation, call.slope});
}

// z = x v^T slice by slice, then the scale in the epilogue; whether its range sufficed.
bool product_then_scale(const LinearCall& call) {
  const LinearShape& shape = call.shape;
  const Tensor xs = matrix(call.x, 0, shape.rows, shape.inner, shape.inner, 1);
  const int64_t slice = slice_rows(shape);
  for (int64_t first = 0; first < shape.features; first += slice) {
    const int64_t count = std::min(slice, shape.features - first);
    row_norms(call.v, call.norms, first, first + count);
    mm(matrix(call.y, first, shape.rows, count, shape.features, 1), xs,
       matrix(call.v, first * shape.inner, shape.inner, count, 1, shape.inner));
  }
  const std::vector<float> scale = scales_of(call.gain, call.norms, shape.features);
  return all_can_wait(scale) && scale_and_add(call, scale, call.bias);
}

}  // namespace

// y = x w^T + b with w = s v in the dtype of x, then residual and activation.
void vendor_linear_by_weight(const LinearCall& call) {
  const LinearShape& shape = call.shape;
  const Tensor w = scaled_weight(call.v, call.gain, call.norms, call.x.scalar_type());
  const Tensor out = matrix(call.y, 0, shape.rows, shape.features, shape.features, 1);
  const Tensor xs = matrix(call.x, 0, shape.rows, shape.inner, shape.inner, 1);
  const Tensor columns = matrix(w, 0, shape.inner, shape.features, 1, shape.inner);
  if (call.bias) {
    Rounded bias({shape.features}, call.x.scalar_type());
    std::copy_n(call.bias, shape.features, bias.data());
    addmm(out, bias.tensor(), xs, columns);
  } else {
    mm(out, xs, columns);
  }
  if (call.residual || call.activation != Activation::kNone)
    scale_and_add(call, std::vector<float>(shape.features, 1.0f), nullptr);
}

void vendor_linear(const LinearCall& call) {
  const bool same = call.x.scalar_type() == call.v.scalar_type();
  if (!same || !product_then_scale(call)) vendor_linear_by_weight(call);
}

void vendor_linear_backward(const LinearGradient& call, const std::optional<Tensor>& dz,
                            const std::optional<Tensor>& scaled, bool invertible) {
  const LinearShape& shape = call.shape;
  const Tensor xs = matrix(call.x, 0, shape.rows, shape.inner, shape.inner, 1);
  std::optional<Tensor> dxs, dw = call.dv;
  if (call.dx) dxs = matrix(*call.dx, 0, shape.rows, shape.inner, shape.inner, 1);
  if (dw && dw->scalar_type() != call.x.scalar_type()) dw = empty({shape.features, shape.inner}, call.x.scalar_type());
  if (dxs && !scaled) {
    std::vector<float> again(shape.features);
    const Tensor w = scaled_weight(call.v, call.gain, again.data(), call.x.scalar_type());
    mm(*dxs, matrix(*dz, 0, shape.rows, shape.features, shape.features, 1), w);
  }
  const int64_t slice = slice_rows(shape);
  for (int64_t first = 0; first < shape.features; first += slice) {
    const int64_t count = std::min(slice, shape.features - first);
    if (scaled && dxs) {
      const Tensor left = matrix(*scaled, first, shape.rows, count, shape.features, 1);
      const Tensor right = matrix(call.v, first * shape.inner, count, shape.inner, shape.inner, 1);
      if (first == 0) mm(*dxs, left, right);
      else addmm(*dxs, *dxs, left, right);
    }
    if (dw) {
      mm(matrix(*dw, first * shape.inner, count, shape.inner, shape.inner, 1),
         matrix(invertible ? *scaled : *dz, first, count, shape.rows, 1, shape.features), xs);
      const RowGradient task{values_of(*dw), values_of(call.v), values_of(*call.dv), call.gain, call.norms, call.dgain,
                             invertible, 1, nullptr};
      for_rows(first, first + count, shape.inner, [&](int64_t begin, int64_t end) {
        layer_kernels().gradient({begin, end, shape.inner}, task);
      });
    }
  }
  if (scaled && dxs && shape.features == 0) torch::stable::zero_(*dxs);
}

}  // namespace wnfused::cpu

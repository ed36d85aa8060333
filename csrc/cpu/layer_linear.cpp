// linear: y = act(s (x v^T) + b + residual), x [M, K], v [N, K], and its gradients.
//
//      M up to 16 or 32    our own kernels, v read once (layer_small.h)
//      else                the vendor's product, v taken in slices that stay in cache:
//
//          v [N, K]  | slice | slice | ...      forward    norms of the slice, then its columns of z = x v^T
//                                               backward   dx += (s dz)[:, slice] v[slice]
//                                                          s dw[slice] = (s dz)[:, slice]^T x, which becomes dv in place
//
// so that memory sees v once forward, v and dv once backward: what the un-normalised layer moves. The scale rides in
// the epilogue on z [M, N], backward in the mask pass; only where that pass is not needed otherwise and M > K, the input
// gradient takes the scaled weight.
//
// With x in bfloat16 the weight is scaled and rounded in one pass, which is eager's cast of float32 parameters.
#include <torch/csrc/stable/library.h>

#include "../ops.h"
#include "layer_tensor.h"

namespace wnfused {
namespace {

using namespace cpu;

constexpr int64_t kSliceEntries = int64_t{1} << 20;  // 4 MB of v beside as much of dv

struct Shape {
  int64_t rows, inner, features;
};

Tensor contiguous_or_self(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

Shape shape_of(const Tensor& x, const Tensor& v, const Tensor& g) {
  STD_TORCH_CHECK(v.dim() == 2 && x.dim() > 0 && x.size(-1) == v.size(1), "linear: x must end in v's in_features");
  check_parameters(x, v, g);
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return {rows, v.size(1), v.size(0)};
}

// Slices only where v does not fit the cache anyway. With many rows of x the product packs all of x anew for each
// slice, which costs more than a slice that only the last level holds.
int64_t slice_rows(const Shape& shape) {
  if (shape.features * shape.inner <= 2 * kSliceEntries) return std::max<int64_t>(shape.features, 1);
  return std::max<int64_t>((shape.rows > 128 ? 8 : 1) * kSliceEntries / shape.inner, 64);
}

// Where our own kernels beat the vendor's product (measured with MKL on AVX-512): short rows pay too much for the sums
// across a vector, and many rows of x make the backward a matter of loads and stores of dx.
bool is_small(const Shape& shape, const Tensor& x) {
  return !is_bfloat16(x) && (shape.rows <= kSmallRows / 2 || (shape.rows <= kSmallRows && shape.inner >= 128));
}

bool is_small_backward(const Shape& shape, const Tensor& x) {
  return !is_bfloat16(x) && (shape.rows <= kSmallRows / 2 ||
                             (shape.rows <= kSmallRows && shape.features * shape.inner <= (int64_t{1} << 18)));
}

}  // namespace

std::tuple<Tensor, Tensor> linear(
    const Tensor& x_given, const Tensor& v_given, const Tensor& g, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual_given, int64_t activation, double slope) {
  const Shape shape = shape_of(x_given, v_given, g);
  const Tensor x = contiguous_or_self(x_given), v = contiguous_or_self(v_given);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = shape.features;
  Tensor y = empty(sizes, x.scalar_type());
  Tensor norm = empty({shape.features}, ScalarType::Float);
  float* norms = static_cast<float*>(norm.mutable_data_ptr());
  std::vector<float> held_gain, held_bias;
  const float* gain = floats_of(g, held_gain);
  const bool half = is_bfloat16(x);
  std::optional<Tensor> residual;
  if (residual_given) residual = contiguous_or_self(*residual_given);
  const Activation act = static_cast<Activation>(activation);

  if (is_small(shape, x)) {
    const SmallLinear task{
        shape.rows, shape.inner, shape.features, static_cast<const float*>(x.const_data_ptr()),
        static_cast<const float*>(v.const_data_ptr()), gain, bias ? floats_of(*bias, held_bias) : nullptr,
        residual ? static_cast<const float*>(residual->const_data_ptr()) : nullptr,
        static_cast<float*>(y.mutable_data_ptr()), norms, act, static_cast<float>(slope)};
    for_rows(0, shape.features, shape.inner * std::max<int64_t>(shape.rows / 2, 1), [&](int64_t begin, int64_t end) {
      layer_kernels().small_linear(task, begin, end);
    });
    if (shape.rows == 0) row_norms(v, norms, 0, shape.features);
    return {y, norm};
  }

  std::vector<float> scale(shape.features, 1.0f), added(shape.features, 0.0f);
  const Tensor xs = matrix(x, 0, shape.rows, shape.inner, shape.inner, 1);
  if (half) {
    const Tensor out = matrix(y, 0, shape.rows, shape.features, shape.features, 1);
    const Tensor w = scaled_weight(v, gain, norms, ScalarType::BFloat16);
    const Tensor columns = matrix(w, 0, shape.inner, shape.features, 1, shape.inner);
    if (bias) addmm(out, is_bfloat16(*bias) ? *bias : torch::stable::to(*bias, ScalarType::BFloat16), xs, columns);
    else mm(out, xs, columns);
    if (act == Activation::kNone && !residual) return {y, norm};
  } else {
    const int64_t slice = slice_rows(shape);
    for (int64_t first = 0; first < shape.features; first += slice) {
      const int64_t count = std::min(slice, shape.features - first);
      row_norms(v, norms, first, first + count);
      mm(matrix(y, first, shape.rows, count, shape.features, 1), xs,
         matrix(v, first * shape.inner, shape.inner, count, 1, shape.inner));
    }
    scale = scales_of(gain, norms, shape.features);
    if (bias) {
      const float* source = floats_of(*bias, held_bias);
      added.assign(source, source + shape.features);
    }
  }
  run_epilogue({true, 0, shape.rows, shape.features, shape.features},
               {values_of(y), residual ? values_of(*residual) : Values{nullptr, half}, scale.data(), added.data(), act,
                static_cast<float>(slope)});
  return {y, norm};
}

namespace {

// dx and dw by our own kernels; every worker sums its share of dx apart, folded in the workers' order.
void small_backward(const SmallLinearBackward& task, float* dx) {
  const int64_t size = task.rows * task.inner;
  const int64_t work = task.features * task.inner * std::max<int64_t>(task.rows / 2, 1);
  const int64_t workers =
      std::clamp<int64_t>(work / kGrain, 1, std::max<int64_t>(torch::stable::get_num_threads(), 1));
  const int64_t share = (task.features + workers - 1) / workers;
  std::vector<float> partial(dx ? (workers - 1) * size : 0, 0.0f);
  if (dx) std::fill(dx, dx + size, 0.0f);
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t w = begin; w < end; ++w) {
      SmallLinearBackward part = task;
      part.dx = !dx ? nullptr : w == 0 ? dx : partial.data() + (w - 1) * size;
      layer_kernels().small_linear_backward(
          part, std::min(task.features, w * share), std::min(task.features, (w + 1) * share));
    }
  };
  if (workers == 1) run(0, 1);
  else torch::stable::parallel_for(0, workers, 1, run);
  if (!dx) return;
  for (int64_t w = 1; w < workers; ++w)
    for (int64_t i = 0; i < size; ++i) dx[i] += partial[(w - 1) * size + i];
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> linear_backward(
    const Tensor& dy_given, const Tensor& y, const Tensor& x_given, const Tensor& v_given, const Tensor& g,
    const Tensor& norm, int64_t needs, int64_t activation, double slope) {
  const bool need_x = needs & 1, need_v = needs & 2, need_bias = needs & 4, need_residual = needs & 8;
  const Shape shape = shape_of(x_given, v_given, g);
  const Tensor x = contiguous_or_self(x_given), v = contiguous_or_self(v_given), dy = contiguous_or_self(dy_given);
  const bool half = is_bfloat16(x), masked = activation != 0;
  const Activation act = static_cast<Activation>(activation);
  std::vector<float> held;
  const float* gain = floats_of(g, held);
  const float* norms = static_cast<const float*>(norm.const_data_ptr());
  const bool small = is_small_backward(shape, x);
  // s dz for the products, unless dy can be taken as it is and the scaled weight is the smaller of the two.
  const bool scale_dz = (need_x || need_v) && !half && !small && (masked || shape.rows <= shape.inner);
  const std::vector<float> scale = scale_dz ? scales_of(gain, norms, shape.features) : std::vector<float>();
  const bool shared = scale_dz && are_invertible(scale, norms);

  Tensor scaled = scale_dz ? empty_as(dy) : nothing(dy);
  Tensor dz = !masked ? dy : shared && !need_residual ? nothing(dy) : empty_as(dy);
  std::vector<float> sums(need_bias ? shape.features : 0);
  if (masked || scale_dz || need_bias) {
    const Tensor signs = masked ? contiguous_or_self(y) : dy;
    run_mask({true, 0, shape.rows, shape.features, shape.features},
             {values_of(dy), values_of(signs), masked && dz.numel() ? values_of(dz) : Values{nullptr, half},
              scale_dz ? values_of(scaled) : Values{nullptr, half}, scale.data(), nullptr, act,
              static_cast<float>(slope)},
             need_bias ? sums.data() : nullptr);
  }
  Tensor db = empty({need_bias ? shape.features : 0}, ScalarType::Float);
  std::copy(sums.begin(), sums.end(), static_cast<float*>(db.mutable_data_ptr()));
  if (is_bfloat16(v)) db = torch::stable::to(db, ScalarType::BFloat16);

  Tensor dx = need_x ? empty_as(x) : nothing(dy);
  Tensor dv = need_v ? empty_as(v) : nothing(v);
  Tensor dg = need_v ? empty({g.sizes().begin(), g.sizes().end()}, ScalarType::Float) : nothing(g);
  float* dgain = need_v ? static_cast<float*>(dg.mutable_data_ptr()) : nullptr;

  if (small) {
    const SmallLinearBackward task{
        shape.rows, shape.inner, shape.features, static_cast<const float*>(x.const_data_ptr()),
        static_cast<const float*>(v.const_data_ptr()), gain, norms, static_cast<const float*>(dz.const_data_ptr()),
        nullptr, need_v ? static_cast<float*>(dv.mutable_data_ptr()) : nullptr, dgain};
    if (need_x || need_v) small_backward(task, need_x ? static_cast<float*>(dx.mutable_data_ptr()) : nullptr);
  } else {
    const Tensor xs = matrix(x, 0, shape.rows, shape.inner, shape.inner, 1);
    const Tensor dxs = need_x ? matrix(dx, 0, shape.rows, shape.inner, shape.inner, 1) : dx;
    const Tensor dw = half && need_v ? empty({shape.features, shape.inner}, ScalarType::BFloat16) : dv;
    if (need_x && !scale_dz) {
      std::vector<float> again(shape.features);
      const Tensor w = scaled_weight(v, gain, again.data(), x.scalar_type());
      mm(dxs, matrix(dz, 0, shape.rows, shape.features, shape.features, 1), w);
    }
    const int64_t slice = slice_rows(shape);
    for (int64_t first = 0; first < shape.features; first += slice) {
      const int64_t count = std::min(slice, shape.features - first);
      if (scale_dz && need_x) {
        const Tensor left = matrix(scaled, first, shape.rows, count, shape.features, 1);
        const Tensor right = matrix(v, first * shape.inner, count, shape.inner, shape.inner, 1);
        if (first == 0) mm(dxs, left, right);
        else addmm(dxs, dxs, left, right);
      }
      if (need_v) {
        mm(matrix(dw, first * shape.inner, count, shape.inner, shape.inner, 1),
           matrix(shared ? scaled : dz, first, count, shape.rows, 1, shape.features), xs);
        const RowGradient task{values_of(dw), values_of(v), values_of(dv), gain, norms, dgain, shared, 1, nullptr};
        for_rows(first, first + count, shape.inner, [&](int64_t begin, int64_t end) {
          layer_kernels().gradient({begin, end, shape.inner}, task);
        });
      }
    }
    if (scale_dz && need_x && shape.features == 0) torch::stable::zero_(dx);
  }
  if (need_v && is_bfloat16(g)) dg = torch::stable::to(dg, ScalarType::BFloat16);
  return {dx, dv, dg, db, need_residual && masked ? dz : nothing(dy)};
}

}  // namespace wnfused

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CPU, library) {
  library.impl("linear", TORCH_BOX(&wnfused::linear));
  library.impl("linear_backward", TORCH_BOX(&wnfused::linear_backward));
}

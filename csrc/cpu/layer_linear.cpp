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
// A float32 weight of a bfloat16 x is scaled and rounded in one pass, which is eager's cast; so is a weight whose scale
// cannot wait (layer.h).
#include <torch/csrc/stable/library.h>

#include <atomic>

#include "../ops.h"
#include "layer_tensor.h"

namespace wnfused {
namespace {

using namespace cpu;

constexpr int64_t kSliceEntries = int64_t{1} << 20;  // 4 MB of v beside as much of dv
constexpr int64_t kSmallHalfRows = 4;

struct Shape {
  int64_t rows, inner, features;
};

Tensor contiguous_or_self(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

Shape shape_of(const Tensor& x, const Tensor& v) {
  STD_TORCH_CHECK(v.dim() == 2 && x.dim() > 0 && x.size(-1) == v.size(1), "linear: x must end in v's in_features");
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
// The vendor's product in bfloat16 has an instruction of its own, which four rows of x are enough to feed.
bool is_small(const Shape& shape, bool half) {
  if (half) return shape.rows <= kSmallHalfRows;
  return shape.rows <= kSmallRows / 2 || (shape.rows <= kSmallRows && shape.inner >= 128);
}

bool is_small_backward(const Shape& shape, bool half) {
  if (half) return shape.rows <= kSmallHalfRows;
  return shape.rows <= kSmallRows / 2 ||
         (shape.rows <= kSmallRows && shape.features * shape.inner <= (int64_t{1} << 18));
}

// One call's tensors, dense, and the numbers that go with the rows of v.
struct Call {
  Shape shape;
  Tensor x, v;
  const float *gain, *bias;
  std::optional<Tensor> residual;
  Activation activation;
  float slope;
};

// The whole layer by our own kernels; whether its range sufficed.
bool small_forward(const Call& call, const Tensor& y, float* norms) {
  std::vector<float> held_x, held_residual;
  const Shape& shape = call.shape;
  const SmallLinear task{
      shape.rows, shape.inner, shape.features, floats_of(call.x, held_x), values_of(call.v), call.gain, call.bias,
      call.residual ? floats_of(*call.residual, held_residual) : nullptr, values_of(y), norms, call.activation,
      call.slope};
  std::atomic<bool> in_range{true};
  // In cache an entry of v costs an eighth of what it does in the passes that kGrain is for.
  for_rows(0, shape.features, shape.inner * std::max<int64_t>(shape.rows, 2) / 8, [&](int64_t begin, int64_t end) {
    if (!layer_kernels().small_linear(task, begin, end)) in_range = false;
  });
  if (shape.rows == 0) row_norms(call.v, norms, 0, shape.features);
  return in_range;
}

bool scale_and_add(const Call& call, const Tensor& y, const std::vector<float>& scale, const float* bias) {
  const std::vector<float> none(bias ? 0 : call.shape.features, 0.0f);
  return run_epilogue({true, 0, call.shape.rows, call.shape.features, call.shape.features},
                      {values_of(y), call.residual ? values_of(*call.residual) : Values{nullptr, is_bfloat16(y)},
                       scale.data(), bias ? bias : none.data(), call.activation, call.slope});
}

// z = x v^T slice by slice, then the scale in the epilogue; whether its range sufficed.
bool product_then_scale(const Call& call, const Tensor& y, float* norms) {
  const Shape& shape = call.shape;
  const Tensor xs = matrix(call.x, 0, shape.rows, shape.inner, shape.inner, 1);
  const int64_t slice = slice_rows(shape);
  for (int64_t first = 0; first < shape.features; first += slice) {
    const int64_t count = std::min(slice, shape.features - first);
    row_norms(call.v, norms, first, first + count);
    mm(matrix(y, first, shape.rows, count, shape.features, 1), xs,
       matrix(call.v, first * shape.inner, shape.inner, count, 1, shape.inner));
  }
  const std::vector<float> scale = scales_of(call.gain, norms, shape.features);
  return all_can_wait(scale) && scale_and_add(call, y, scale, call.bias);
}

// y = x w^T + b with w = s v in the dtype of x, then residual and activation.
void scale_then_product(const Call& call, const Tensor& y, float* norms) {
  const Shape& shape = call.shape;
  const Tensor w = scaled_weight(call.v, call.gain, norms, call.x.scalar_type());
  const Tensor out = matrix(y, 0, shape.rows, shape.features, shape.features, 1);
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
    scale_and_add(call, y, std::vector<float>(shape.features, 1.0f), nullptr);
}

}  // namespace

std::tuple<Tensor, Tensor> linear(
    const Tensor& x, const Tensor& v, const Tensor& g, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& residual, int64_t activation, double slope) {
  check_parameters(x, v, g, bias);
  check_activation(activation, slope);
  const Shape shape = shape_of(x, v);
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = shape.features;
  Tensor y = empty(sizes, x.scalar_type());
  check_residual(residual, y);
  Tensor norm = empty({shape.features}, ScalarType::Float);
  float* norms = static_cast<float*>(norm.mutable_data_ptr());
  std::vector<float> held_gain, held_bias;
  Call call{shape, contiguous_or_self(x), contiguous_or_self(v), floats_of(g, held_gain),
            bias ? floats_of(*bias, held_bias) : nullptr, std::nullopt, static_cast<Activation>(activation),
            static_cast<float>(slope)};
  if (residual) call.residual = contiguous_or_self(*residual);
  const bool done = is_small(shape, is_bfloat16(x)) ? small_forward(call, y, norms)
                    : x.scalar_type() == v.scalar_type() && product_then_scale(call, y, norms);
  if (!done) scale_then_product(call, y, norms);
  return {y, norm};
}

namespace {

// dx and dw by our own kernels; every worker sums its share of dx apart, folded in the workers' order.
void small_backward(const SmallLinearBackward& task, float* dx) {
  const int64_t size = task.rows * task.inner;
  const int64_t work = task.features * task.inner * std::max<int64_t>(task.rows / 2, 1);
  const int64_t workers =
      std::clamp<int64_t>(work / (2 * kGrain), 1, std::max<int64_t>(torch::stable::get_num_threads(), 1));
  const int64_t share = (task.features + workers - 1) / workers;
  const int64_t room = task.dv.bfloat16 ? kSmallTile * task.inner : 0;
  std::vector<float> partial(dx ? (workers - 1) * size : 0, 0.0f), scratch(workers * room);
  if (dx) std::fill(dx, dx + size, 0.0f);
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t w = begin; w < end; ++w) {
      SmallLinearBackward part = task;
      part.dx = !dx ? nullptr : w == 0 ? dx : partial.data() + (w - 1) * size;
      part.scratch = scratch.data() + w * room;
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

std::tuple<Gradient, Gradient, Gradient, Gradient, Gradient> linear_backward(
    const Tensor& dy_given, const Tensor& y, const Tensor& x_given, const Tensor& v_given, const Tensor& g,
    const Tensor& norm, int64_t needs, int64_t activation, double slope) {
  const bool need_x = needs & 1, need_v = needs & 2, need_bias = needs & 4, need_residual = needs & 8;
  check_parameters(x_given, v_given, g, std::nullopt);
  const Shape shape = shape_of(x_given, v_given);
  const Tensor x = contiguous_or_self(x_given), v = contiguous_or_self(v_given), dy = contiguous_or_self(dy_given);
  const bool half = is_bfloat16(x), masked = activation != 0;
  std::vector<float> held;
  const float* gain = floats_of(g, held);
  const float* norms = entries<float>(norm);
  const bool small = is_small_backward(shape, half);
  // s dz for the products, unless dy can be taken as it is and the scaled weight is the smaller of the two.
  const bool scale_dz = (need_x || need_v) && half == is_bfloat16(v) && !small && (masked || shape.rows <= shape.inner);
  const std::vector<float> scale = scale_dz ? scales_of(gain, norms, shape.features) : std::vector<float>();
  const bool shared = scale_dz && are_invertible(scale, norms);

  Gradient dx, dv, dg, db, scaled, dz = dy;
  if (scale_dz) scaled = empty_as(dy);
  if (masked && shared && !need_residual) dz.reset();
  else if (masked) dz = empty_as(dy);
  std::optional<Rounded> bias_gradient;
  if (need_bias) bias_gradient.emplace(std::vector<int64_t>{shape.features}, v.scalar_type());
  if (masked || scale_dz || need_bias) {
    const Tensor signs = masked ? contiguous_or_self(y) : dy;
    run_mask({true, 0, shape.rows, shape.features, shape.features},
             {values_of(dy), values_of(signs), masked && dz ? values_of(*dz) : Values{nullptr, half},
              scale_dz ? values_of(*scaled) : Values{nullptr, half}, scale.data(), nullptr,
              static_cast<Activation>(activation), static_cast<float>(slope)},
             need_bias ? bias_gradient->data() : nullptr);
  }
  if (need_bias) db = bias_gradient->tensor();

  std::optional<Rounded> gain_gradient;
  if (need_v) {
    dv = empty_as(v);
    gain_gradient.emplace(sizes_of(g), g.scalar_type());
  }
  float* dgain = need_v ? gain_gradient->data() : nullptr;

  if (small && (need_x || need_v)) {
    std::vector<float> held_x, held_dz;
    std::optional<Rounded> input_gradient;
    if (need_x && half) input_gradient.emplace(sizes_of(x), x.scalar_type());
    else if (need_x) dx = empty_as(x);
    const SmallLinearBackward task{
        shape.rows, shape.inner, shape.features, floats_of(x, held_x), values_of(v), gain, norms,
        floats_of(*dz, held_dz), nullptr, need_v ? values_of(*dv) : Values{nullptr, is_bfloat16(v)}, dgain, nullptr};
    small_backward(task, !need_x ? nullptr : half ? input_gradient->data() : static_cast<float*>(dx->mutable_data_ptr()));
    if (input_gradient) dx = input_gradient->tensor();
  } else if (need_x || need_v) {
    const Tensor xs = matrix(x, 0, shape.rows, shape.inner, shape.inner, 1);
    std::optional<Tensor> dxs, dw = dv;
    if (need_x) {
      dx = empty_as(x);
      dxs = matrix(*dx, 0, shape.rows, shape.inner, shape.inner, 1);
    }
    if (half && need_v && !is_bfloat16(v)) dw = empty({shape.features, shape.inner}, ScalarType::BFloat16);
    if (need_x && !scale_dz) {
      std::vector<float> again(shape.features);
      const Tensor w = scaled_weight(v, gain, again.data(), x.scalar_type());
      mm(*dxs, matrix(*dz, 0, shape.rows, shape.features, shape.features, 1), w);
    }
    const int64_t slice = slice_rows(shape);
    for (int64_t first = 0; first < shape.features; first += slice) {
      const int64_t count = std::min(slice, shape.features - first);
      if (scale_dz && need_x) {
        const Tensor left = matrix(*scaled, first, shape.rows, count, shape.features, 1);
        const Tensor right = matrix(v, first * shape.inner, count, shape.inner, shape.inner, 1);
        if (first == 0) mm(*dxs, left, right);
        else addmm(*dxs, *dxs, left, right);
      }
      if (need_v) {
        mm(matrix(*dw, first * shape.inner, count, shape.inner, shape.inner, 1),
           matrix(shared ? *scaled : *dz, first, count, shape.rows, 1, shape.features), xs);
        const RowGradient task{values_of(*dw), values_of(v), values_of(*dv), gain, norms, dgain, shared, 1, nullptr};
        for_rows(first, first + count, shape.inner, [&](int64_t begin, int64_t end) {
          layer_kernels().gradient({begin, end, shape.inner}, task);
        });
      }
    }
    if (scale_dz && need_x && shape.features == 0) torch::stable::zero_(*dx);
  }
  if (need_v) dg = gain_gradient->tensor();
  if (!need_residual || !masked) dz.reset();
  return {dx, dv, dg, db, dz};
}

}  // namespace wnfused

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CPU, library) {
  library.impl("linear", TORCH_BOX(&wnfused::linear));
  library.impl("linear_backward", TORCH_BOX(&wnfused::linear_backward));
}

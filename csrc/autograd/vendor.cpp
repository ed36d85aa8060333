// Single layers on CUDA tensors: the weight is scaled once, by _cuda's kernel beside the product, and the product is
// cuBLAS's or cuDNN's; linear layers of few samples are small_linear.h's. wnfused/backends/triton/vendor.py tells the
// same in Python, for the layers that this does not take.
//
// They are here, not in _cuda, as torch's stable ABI has no convolutions; and in C++, as a small layer's time on a GPU
// is the host's: in Python its checks and launches cost twice what torch's own layer costs.
#include "autograd/vendor.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <cmath>
#include <mutex>
#include <vector>

#include "autograd/formats.h"
#include "autograd/op.h"
#include "autograd/small_linear.h"

namespace wnfused::vendor {

using enum Activation;

namespace {

using at::MemoryFormat;

// ----------------------------------------------------------------------------------------------------- the weight

// As it is if its entries lie without gaps, in the order of its dims or with channels fastest; else a copy. torch's
// is_contiguous leaves out dims of size 1, whose strides may be anything.
Tensor without_gaps(const Tensor& t) {
  if (t.is_contiguous()) return t;
  const MemoryFormat format = t.suggest_memory_format();
  if (format == MemoryFormat::ChannelsLast && t.strides() == IntArrayRef(c10::get_channels_last_strides_2d(t.sizes())))
    return t;
  if (format == MemoryFormat::ChannelsLast3d &&
      t.strides() == IntArrayRef(c10::get_channels_last_strides_3d(t.sizes())))
    return t;
  return at::empty(t.sizes(), t.options().memory_format(format)).copy_(t);
}

struct Weight {
  Tensor w, norm;
  Optional bias;
};

// In x's dtype. `bias` is rounded to it; `with_norm`: whether the norms are wanted.
Weight weight_of(
    const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias, MemoryFormat format, bool with_norm) {
  static const auto run =
      op<void(const Tensor&, const Tensor&, const Optional&, const Tensor&, const Optional&, const Optional&)>(
          "wnfused_native::layer_weight_");
  Weight made;
  made.w = at::empty(v.sizes(), v.options().dtype(x.scalar_type()).memory_format(format));
  if (with_norm) made.norm = at::empty({v.size(0)}, v.options().dtype(at::kFloat));
  const bool rounds = bias && bias->scalar_type() != x.scalar_type();
  made.bias = rounds ? at::empty({v.size(0)}, made.w.options()) : bias;
  const Optional norm = with_norm ? Optional(made.norm) : Optional();
  const Optional given = rounds ? Optional(bias->contiguous()) : Optional();
  run.call(without_gaps(v), g.contiguous(), given, made.w, norm, rounds ? made.bias : Optional());
  return made;
}

// dv and dg from dw, whatever order it lies in, and dbias from the sums of `partial`, where there are any.
struct WeightGradients {
  Tensor dv, dg;
  Optional dbias;
};

WeightGradients through_weight_norm(
    const Tensor& dw, const Tensor& v, const Tensor& g, const Tensor& norm, const Optional& partial) {
  static const auto run =
      op<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Optional&,
              const Optional&)>("wnfused_native::layer_weight_backward_");
  const Tensor directions = without_gaps(v), gains = g.contiguous();
  WeightGradients made{at::empty_like(directions), at::empty_like(gains), Optional()};
  if (partial) made.dbias = at::empty({v.size(0)}, v.options());
  run.call(without_gaps(dw), directions, gains, norm, made.dv, made.dg, partial, made.dbias);
  return made;
}

// ------------------------------------------------------------------------------------------------------- the ends

// The rows of a linear layer's input or output.
Tensor rows_of(const Tensor& t) {
  if (t.dim() == 2) return t;
  const int64_t columns = t.size(-1);
  return t.reshape({c10::multiply_integers(t.sizes().slice(0, t.dim() - 1)), columns});
}

void check_arguments(
    const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias, int64_t features, int64_t activation,
    double slope) {
  TORCH_CHECK(x.device() == v.device() && x.device() == g.device(), "all tensors must be on one device");
  TORCH_CHECK(g.dim() == 1 || g.dim() == v.dim(), "g must have one dim, or v's");
  TORCH_CHECK(g.numel() == v.size(0) && g.size(0) == v.size(0), "g must have one entry a row of v");
  TORCH_CHECK(
      !bias || (bias->dim() == 1 && bias->size(0) == features && bias->device() == x.device()),
      "bias must have one entry an output");
  TORCH_CHECK(
      !bias || bias->scalar_type() == x.scalar_type() || bias->scalar_type() == at::kFloat,
      "bias must be in the dtype of x or float32");
  TORCH_CHECK(activation == kNone || activation == kRelu || activation == kLeakyRelu, "unknown activation");
  TORCH_CHECK(
      activation != kLeakyRelu || (slope >= 0 && std::isfinite(slope)), "negative_slope must be finite and at least 0");
}

void check_residual(const Optional& residual, IntArrayRef sizes, const Tensor& x) {
  TORCH_CHECK(
      !residual || (residual->sizes() == sizes && residual->scalar_type() == x.scalar_type() &&
                    residual->device() == x.device()),
      "residual must be as the output is");
}

// y <- act(y + bias + residual), in place and in one pass.
void finish(const Tensor& y, const Optional& bias, const Optional& residual, int64_t channel, int64_t activation,
            double slope) {
  check_residual(residual, y.sizes(), y);
  if (!bias && !residual && activation == kNone) return;
  static const auto run = op<void(const Tensor&, const Optional&, const Optional&, int64_t, int64_t, double)>(
      "wnfused_native::layer_epilogue_");
  Optional added = residual;
  if (residual && residual->strides() != y.strides()) added = at::empty_like(y).copy_(*residual);
  run.call(y, bias, added, channel, activation, slope);
}

// The gradient before the activation, and its sums over shares of each channel, where they are wanted: one pass.
struct Masked {
  Tensor dz;
  Optional partial;
};

// The mask is read off the output, whose sign is the input's. A leaky ReLU of slope 0 is a ReLU, where dy is infinite
// and where y is NaN, too.
Masked masked(const Tensor& dy, const Tensor& y, int64_t channel, int64_t activation, double slope, bool sums) {
  const bool masks = activation != kNone;
  if (!masks && !sums) return {dy, Optional()};
  static const auto run =
      op<Tensor(const Tensor&, const Optional&, const Optional&, int64_t, double, bool)>("wnfused_native::layer_mask_");
  const Tensor like = without_gaps(masks ? y : dy);
  const Tensor given = !masks ? like : dy.strides() == like.strides() ? dy : at::empty_like(like).copy_(dy);
  Masked made{masks ? at::empty_like(like) : given, Optional()};
  const Tensor partial = run.call(
      given, masks ? Optional(like) : Optional(), masks ? Optional(made.dz) : Optional(), channel,
      activation == kLeakyRelu ? slope : 0.0, sums);
  if (sums) made.partial = partial;
  return made;
}

// dv, dg and dbias, as they are needed; `dw` gives the product's.
template <class Product>
void take_weight_gradients(
    Gradients& found, const Needs& needs, const Product& dw, const Tensor& v, const Tensor& g, const Tensor& norm,
    const Optional& partial) {
  if (needs.v) {
    WeightGradients made = through_weight_norm(dw(), v, g, norm, partial);
    std::get<1>(found) = made.dv;
    std::get<2>(found) = made.dg;
    std::get<3>(found) = made.dbias;
  } else if (partial) {
    std::get<3>(found) = partial->sum(0).to(v.scalar_type());
  }
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------- linear

Outputs linear(
    const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias, const Optional& residual,
    int64_t activation, double slope) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  TORCH_CHECK(v.dim() == 2 && x.dim() > 0 && x.size(-1) == v.size(1), "x must end in the columns of v");
  check_arguments(x, v, g, bias, v.size(0), activation, slope);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = v.size(0);
  const auto as_x = [&](const Tensor& y) { return x.dim() == 2 ? y : at::_unsafe_view(y, sizes); };
  const Tensor rows = rows_of(x);
  if (small_linear::takes(x.scalar_type(), rows.size(0), v)) {
    check_residual(residual, sizes, x);
    const Optional added = residual ? Optional(rows_of(*residual)) : residual;
    Outputs made =
        small_linear::forward(rows, v, g, bias, added, activation != kNone, activation == kLeakyRelu ? slope : 0.0);
    made.y = as_x(made.y);
    return made;
  }
  const Weight weight = weight_of(x, v, g, bias, MemoryFormat::Contiguous, true);
  const Tensor w = weight.w.t();
  const Tensor y =
      as_x(weight.bias ? at::addmm(*weight.bias, rows, w) : at::mm(rows, w));  // the bias rides in the product
  finish(y, Optional(), residual, y.dim() - 1, activation, slope);
  return {y, weight.norm, weight.w};
}

Gradients linear_backward(
    const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& v, const Tensor& g, const Tensor& norm,
    const Tensor& known, const Needs& needs, int64_t activation, double slope) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const bool masks = activation != kNone, gives_dz = needs.residual && masks;
  const Tensor rows = rows_of(dy), y_rows = masks ? rows_of(y) : rows;
  if (!known.defined() && small_linear::takes(x.scalar_type(), rows.size(0), v)) {
    // The kernels mask dy as they read it, each for itself; the residual's gradient is that of it all, and the bias's
    // alone is its sum.
    Needs asked = needs;
    asked.bias = needs.bias && needs.v;
    const bool bias_alone = needs.bias && !needs.v, masks_first = gives_dz || bias_alone;
    const auto [dz, partial] =
        masks_first ? masked(rows, y_rows, 1, activation, slope, bias_alone) : Masked{rows, Optional()};
    Gradients found = small_linear::backward(
        dz, y_rows, rows_of(x), v, g, norm, asked, masks && !masks_first, activation == kLeakyRelu ? slope : 0.0);
    if (partial) std::get<3>(found) = partial->sum(0).to(v.scalar_type());
    if (std::get<0>(found)) std::get<0>(found) = std::get<0>(found)->view(x.sizes());
    if (gives_dz) std::get<4>(found) = dz.view(y.sizes());
    return found;
  }
  const auto [dz, partial] = masked(rows, y_rows, 1, activation, slope, needs.bias);
  const Tensor across = dz.t();
  Gradients found;
  if (needs.x) {
    const Tensor w =
        known.defined() ? known : weight_of(x, v, g, Optional(), MemoryFormat::Contiguous, false).w;
    std::get<0>(found) = at::mm(dz, w).view(x.sizes());
  }
  take_weight_gradients(found, needs, [&] { return at::mm(across, rows_of(x)); }, v, g, norm, partial);
  if (gives_dz) std::get<4>(found) = dz.view(y.sizes());
  return found;
}

// ----------------------------------------------------------------------------------------------------- convolutions

namespace {

// cuDNN's deterministic algorithms while somebody asks for them: some of its backward kernels add with atomics
// otherwise. torch has one flag for all threads, and a backward has a thread to each device: the first in sets it, the
// last out restores it.
void ask_for_deterministic(bool on) {
  static std::mutex mutex;
  static int asked = 0;
  static bool is_ours = false;
  const std::lock_guard<std::mutex> lock(mutex);
  if (on && asked++ == 0 && !at::globalContext().deterministicCuDNN()) {
    at::globalContext().setDeterministicCuDNN(true);
    is_ours = true;
  }
  if (!on && --asked == 0 && is_ours) {
    at::globalContext().setDeterministicCuDNN(false);
    is_ours = false;
  }
}

struct Deterministic {
  Deterministic() { ask_for_deterministic(true); }
  ~Deterministic() { ask_for_deterministic(false); }
  Deterministic(const Deterministic&) = delete;
  Deterministic& operator=(const Deterministic&) = delete;
};

}  // namespace

Outputs conv(
    const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias, const Optional& residual,
    IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups, int64_t activation, double slope) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  TORCH_CHECK(v.dim() >= 3 && x.dim() == v.dim(), "x and v must have the same 3 dims or more");
  check_arguments(x, v, g, bias, v.size(0), activation, slope);
  const MemoryFormat format = formats::of_product(x, v);
  const Weight weight = weight_of(x, v, g, bias, format, true);
  const std::vector<int64_t> none(stride.size(), 0);
  Tensor y;
  {
    const Deterministic algorithms;
    y = at::convolution(x, weight.w, std::nullopt, stride, padding, dilation, false, none, groups).contiguous(format);
  }
  finish(y, weight.bias ? Optional(weight.bias->contiguous()) : weight.bias, residual, 1, activation, slope);
  return {y, weight.norm, weight.w};
}

Gradients conv_backward(const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& v, const Tensor& g,
                        const Tensor& norm, const Tensor& known, const Needs& needs, IntArrayRef stride,
                        IntArrayRef padding, IntArrayRef dilation, int64_t groups, int64_t activation, double slope) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto [dz, partial] = masked(dy, y, 1, activation, slope, needs.bias);
  Gradients found;
  Tensor dx, dw;
  if (needs.x || needs.v) {
    const MemoryFormat format = formats::of_product(x, v);
    Tensor w = known;
    if (!w.defined() && needs.x) w = weight_of(x, v, g, Optional(), format, false).w;
    // The weight's own gradient asks for its shape alone.
    if (!w.defined()) w = at::empty(v.sizes(), v.options().dtype(x.scalar_type()).memory_format(format));
    const std::vector<int64_t> none(stride.size(), 0);
    const Deterministic algorithms;
    std::tie(dx, dw, std::ignore) = at::convolution_backward(
        dz, x, w, std::nullopt, stride, padding, dilation, false, none, groups,
        {needs.x, needs.v, false});
  }
  if (needs.x) std::get<0>(found) = dx;
  take_weight_gradients(found, needs, [&] { return dw; }, v, g, norm, partial);
  if (needs.residual && activation != kNone) std::get<4>(found) = dz;
  return found;
}

// --------------------------------------------------------------------------------------------------------- as ops

namespace {

std::tuple<Tensor, Tensor> linear_op(
    const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias, const Optional& residual,
    int64_t activation, double slope) {
  const Outputs made = linear(x, v, g, bias, residual, activation, slope);
  return {made.y, made.norm};
}
Gradients linear_backward_op(
    const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& v, const Tensor& g, const Tensor& norm,
    int64_t needs, int64_t activation, double slope) {
  return linear_backward(dy, y, x, v, g, norm, Tensor(), Needs::of(needs), activation, slope);
}
std::tuple<Tensor, Tensor> conv_op(
    const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias, const Optional& residual,
    IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups, int64_t activation, double slope) {
  const Outputs made = conv(x, v, g, bias, residual, stride, padding, dilation, groups, activation, slope);
  return {made.y, made.norm};
}
Gradients conv_backward_op(
    const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& v, const Tensor& g, const Tensor& norm,
    int64_t needs, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups, int64_t activation,
    double slope) {
  return conv_backward(
      dy, y, x, v, g, norm, Tensor(), Needs::of(needs), stride, padding, dilation, groups, activation, slope);
}

}  // namespace
}  // namespace wnfused::vendor

// The schemas stand in wnfused/backends/native_schemas.py.
TORCH_LIBRARY_IMPL(wnfused_native, CUDA, library) {
  using namespace wnfused::vendor;
  library.impl("linear", linear_op);
  library.impl("linear_backward", linear_backward_op);
  library.impl("conv", conv_op);
  library.impl("conv_backward", conv_backward_op);
}

// The same on tensors of any device that has a layer_weight_, for tests; in wnfused/backends/native_autograd.py.
TORCH_LIBRARY_IMPL(wnfused_autograd, CompositeExplicitAutograd, library) {
  using namespace wnfused::vendor;
  library.impl("vendor_linear", linear_op);
  library.impl("vendor_linear_backward", linear_backward_op);
  library.impl("vendor_conv", conv_op);
  library.impl("vendor_conv_backward", conv_backward_op);
  library.impl("ask_for_deterministic", ask_for_deterministic);
}

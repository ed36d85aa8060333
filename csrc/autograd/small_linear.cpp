// The choice, and what the kernels ask of their tensors.
#include "autograd/small_linear.h"

#include <ATen/Context.h>
#include <torch/library.h>

#include <atomic>

#include "autograd/op.h"
#include "cuda/small_linear_limits.h"

namespace wnfused::small_linear {
namespace {

// By bytes: every block of eight rows of v reads all of x. So many bytes of the second-level cache take an H100 7 us,
// and with more of them the vendor's product is expected to be the faster way, which no run has asked; not with up to
// 32 samples, where one pass over v is most of the work, and scaling it first makes three. What is taken runs in 0.45
// to 0.96 of the vendor's time on an H200, in graphs. kMostEntries: of x, what a block of the weight's gradient walks
// in 10 us.
constexpr int64_t kMostBytes = int64_t{1} << 25, kMostEntries = int64_t{1} << 18;
constexpr int64_t kVeryFewSamples = 32, kRowsOfABlock = 8;

std::atomic<bool> is_used{true};

bool suits_loads(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0; }

// Dense, at an address that suits loads of 16 bytes.
Tensor readable(const Tensor& t) {
  const Tensor dense = t.contiguous();
  return suits_loads(dense) ? dense : dense.clone();
}

Optional readable(const Optional& t) { return t ? Optional(readable(*t)) : t; }

bool allows_tf32(const Tensor& x) {
  return x.scalar_type() == at::kFloat &&
         at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
             at::Float32Precision::TF32;
}

}  // namespace

bool takes(at::ScalarType dtype, int64_t samples, const Tensor& v) {
  const int64_t rows = v.size(0), columns = v.size(1), bytes = dtype == at::kFloat ? 4 : 2;
  if (!is_used.load(std::memory_order_relaxed)) return false;
  if (dtype != at::kFloat && dtype != at::kBFloat16) return false;
  if (samples == 0 || samples > kMostSmallSamples || rows > kMostSmallRows || columns > kMostSmallColumns) return false;
  if (rows % kSmallRowStep || columns % kSmallColumnStep || samples * columns > kMostEntries) return false;
  return samples <= kVeryFewSamples || rows / kRowsOfABlock * samples * columns * bytes <= kMostBytes;
}

bool use(bool on) { return is_used.exchange(on); }

Outputs forward(
    const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias, const Optional& residual,
    bool activates, double slope) {
  static const auto run = op<void(const Tensor&, const Tensor&, const Tensor&, const Optional&, const Optional&,
                                  const Tensor&, const Tensor&, bool, double, bool)>("wnfused_native::small_linear_");
  Outputs made;
  made.y = at::empty({x.size(0), v.size(0)}, x.options());
  made.norm = at::empty({v.size(0)}, v.options().dtype(at::kFloat));
  run.call(readable(x), readable(v), readable(g), readable(bias), readable(residual), made.y, made.norm, activates,
           slope, allows_tf32(x));
  return made;
}

Gradients backward(
    const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& v, const Tensor& g, const Tensor& norm,
    const Needs& needs, bool activates, double slope) {
  static const auto run =
      op<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Optional&,
              const Optional&, const Optional&, const Optional&, bool, double, bool)>(
          "wnfused_native::small_linear_backward_");
  const Tensor directions = readable(v), gains = readable(g), gradient = readable(dy);
  Gradients found;
  auto& [dx, dv, dg, dbias, dz] = found;
  if (needs.x) dx = at::empty(x.sizes(), x.options());
  if (needs.v) {
    dv = at::empty_like(directions);
    dg = at::empty_like(gains);
  }
  if (needs.v && needs.bias) dbias = at::empty({v.size(0)}, v.options());
  if (dx || dv)
    run.call(gradient, activates ? readable(y) : gradient, readable(x), directions, gains, readable(norm), dx, dv, dg,
             dbias, activates, slope, allows_tf32(x));
  return found;
}

}  // namespace wnfused::small_linear

// The schema stands in wnfused/backends/native_autograd.py.
TORCH_LIBRARY_IMPL(wnfused_autograd, CompositeExplicitAutograd, library) {
  library.impl("use_small_linear", wnfused::small_linear::use);
}

// A residual stage on CPU tensors with its autograd node in C++, as layers.cpp has the layers. The node of Python's in
// wnfused/ops/residual_stage.py does the same, in 50 us more, and takes its place where this library is missing.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "autograd/node.h"
#include "autograd/op.h"

namespace wnfused {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Optional = std::optional<Tensor>;

using ForwardOp = std::tuple<Tensor, Tensor, Tensor>(  // y, norm, maps
    const Tensor& x, const Tensor& v, const Tensor& g, const Tensor& bias, double skip_scale, int64_t recompute,
    bool save);
using BackwardOp =
    std::tuple<Tensor, Tensor, Tensor, Tensor>(  // dx, dv, dg, dbias, the last three empty without parameters
        const Tensor& dy, const Tensor& v, const Tensor& g, const Tensor& bias, const Tensor& norm, const Tensor& maps,
        double skip_scale, int64_t recompute, bool parameters);
// Gradients that have derivatives of their own, or many at once. needs: a bit for each of x, v, g and bias.
using GeneralOp = std::tuple<Optional, Optional, Optional, Optional>(
    const Tensor& dy, const Tensor& x, const Tensor& v, const Tensor& g, const Tensor& bias, int64_t needs,
    double skip_scale, int64_t recompute);

// Under this name a tensor shows its node.
struct WNResidualStage : torch::autograd::Function<WNResidualStage> {
  static constexpr const char* kSkipScale = "skip_scale";
  static constexpr const char* kRecompute = "recompute";
  static constexpr size_t kInputs = 6;

  static Tensor forward(
      AutogradContext* ctx, const Tensor& x, const Tensor& v, const Tensor& g, const Tensor& bias, double skip_scale,
      int64_t recompute) {
    const KernelsOnly guard;
    static const auto run = op<ForwardOp>(StageNames::kForward);
    const auto [y, norm, maps] = run.call(x, v, g, bias, skip_scale, recompute, true);
    // As many, in the order of the op's own derivative: a checkpoint may run the forward again under another backend.
    const Tensor signs = at::empty({0}, x.options().dtype(at::kByte));
    ctx->save_for_backward({x, v, g, bias, norm, maps, signs});
    ctx->set_materialize_grads(false);
    ctx->saved_data[kSkipScale] = skip_scale;
    ctx->saved_data[kRecompute] = recompute;
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& outputs) {
    variable_list found(kInputs);
    const Tensor& dy = outputs[0];
    if (!dy.defined()) return found;
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &v = saved[1], &g = saved[2], &bias = saved[3], &norm = saved[4], &maps = saved[5];
    const double skip_scale = ctx->saved_data[kSkipScale].toDouble();
    const int64_t recompute = ctx->saved_data[kRecompute].toInt();
    int64_t needs = 0;
    for (size_t i = 0; i < 4; ++i) needs |= int64_t{ctx->needs_input_grad(i)} << i;
    const auto put = [&](size_t i, const Optional& gradient) {
      if (gradient && (needs >> i & 1)) found[i] = *gradient;
    };
    const auto put_all = [&](const auto& gradients) {
      put(0, std::get<0>(gradients));
      put(1, std::get<1>(gradients));
      put(2, std::get<2>(gradients));
      put(3, std::get<3>(gradients));
    };
    if (asks_for_graph(dy)) {
      static const auto run = op<GeneralOp>(StageNames::kGeneral);
      put_all(run.redispatch(kPastDispatch, dy, x, v, g, bias, needs, skip_scale, recompute));
    } else {
      const KernelsOnly guard;
      static const auto run = op<BackwardOp>(StageNames::kBackward);
      const bool parameters = needs >> 1 != 0;
      put_all(run.call(dy, v, g, bias, norm, maps, skip_scale, recompute, parameters));
    }
    return found;
  }
};

Tensor residual_stage(
    const Tensor& x, const Tensor& v, const Tensor& g, const Tensor& bias, double skip_scale, int64_t recompute) {
  return WNResidualStage::apply(x, v, g, bias, skip_scale, recompute);
}

}  // namespace
}  // namespace wnfused

// The schemas stand in wnfused/backends/native_autograd.py.
TORCH_LIBRARY_IMPL(wnfused_autograd, CompositeImplicitAutograd, library) {
  library.impl("residual_stage", wnfused::residual_stage);
}

// Layers with their autograd nodes in C++: what the fast path of a layer (wnfused/ops/_direct.py) records. A node of
// Python's costs as much as the arithmetic of 128 features, forward and backward.
//
// torch's stable ABI has no autograd. So this library, unlike the others, fits one version of torch, and does nothing
// that the node in wnfused/ops/_nodes.py does not do as well: where it is missing, that one takes its place.
#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "autograd/composed_layer.h"
#include "autograd/input_gradient.h"
#include "autograd/kept.h"
#include "autograd/layer.h"
#include "autograd/layer_graph.h"
#include "autograd/node.h"
#include "autograd/op.h"
#include "autograd/vendor.h"
#include "autograd/zero_gradient.h"

namespace wnfused {
namespace {

using at::IntArrayRef;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Outputs = std::tuple<Tensor, Tensor>;  // y, norm

template <class... Constants>
using ForwardOp = Outputs(
    const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias, const Optional& residual, Constants...);
template <class... Constants>
using BackwardOp = Gradients(
    const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& v, const Tensor& g, const Tensor& norm,
    int64_t needs, Constants...);
// The same with all that a node knows, for gradients that are more than one call of a kernel: a graph of them is asked
// for, or they are batches. needs: a bit for each of x, v, g, bias and residual.
template <class... Constants>
using GeneralOp = Gradients(
    const Tensor& dy, const Optional& y, const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias,
    const Optional& residual, const Tensor& norm, int64_t needs, Constants...);

// --------------------------------------------------------------------------------------------- the kinds of layers

// The ops that run one kind of layer, by their names.
template <class Names, class... Constants>
struct Ops {
  static Outputs forward(const LayerInputs& of, Constants... constants) {
    static const auto run = op<ForwardOp<Constants...>>(Names::kForward);
    return run.call(of.x, of.v, of.g, of.bias, of.residual, constants...);
  }
  static Gradients backward(
      const Tensor& dy, const Tensor& y, const Tensor& x, const Tensor& v, const Tensor& g, const Tensor& norm,
      int64_t needs, Constants... constants) {
    static const auto run = op<BackwardOp<Constants...>>(Names::kBackward);
    return run.call(dy, y, x, v, g, norm, needs, constants...);
  }
  static Gradients general(
      const Tensor& dy, const Optional& y, const LayerInputs& of, const Tensor& norm, int64_t needs,
      Constants... constants) {
    static const auto run = op<GeneralOp<Constants...>>(Names::kGeneral);
    return run.redispatch(
        kPastDispatch, dy, y, of.x, of.v, of.g, of.bias, of.residual, norm, needs, constants...);
  }
};

using layer_graph::Convolution;
using layer_graph::Saved;

// Beside its ops a kind has a function of the vendor's, forward and backward, if CUDA tensors run by that; `graph`, its
// gradients as a graph, where that can be had; and `composed`, the whole layer of torch's own ops.
template <class... Constants>
struct Linear : Ops<LinearNames, Constants...> {
  static constexpr auto kVendor = &vendor::linear;
  static constexpr auto kVendorBackward = &vendor::linear_backward;

  static std::optional<Gradients> graph(const Tensor& dy, const Saved& saved, const Needs& needs, Constants... of) {
    return layer_graph::linear(dy, saved, needs, 0, of...);
  }
  static Tensor composed(const LayerInputs& inputs, Constants... of) {
    return composed_layer::linear(inputs, 0, of...);
  }
};

template <class... Constants>
struct LinearOfNorm : Ops<LinearOfNormNames, Constants...> {
  static std::optional<Gradients> graph(const Tensor& dy, const Saved& saved, const Needs& needs, Constants... of) {
    return layer_graph::linear(dy, saved, needs, of...);
  }
  static Tensor composed(const LayerInputs& inputs, Constants... of) { return composed_layer::linear(inputs, of...); }
};

// By the input alone kernels, faster than torch's convolution, and by anything else a graph of torch's ops.
template <class Run, class... Constants>
std::optional<Gradients> conv_graph(const Tensor& dy, const Saved& saved, const Needs& needs, Constants... constants) {
  const Convolution of = Run::convolution(constants...);
  if (!layer_graph::can_compose(saved.x, saved.v, of)) return std::nullopt;
  if (needs.of_input_alone()) return input_gradient<Run>(dy, saved, needs.residual, constants...);
  const auto all = std::tie(constants...);
  return layer_graph::conv(dy, saved, needs, of, activation_of(all), slope_of(all));
}

template <class Run, class... Constants>
Tensor composed_conv(const LayerInputs& inputs, Constants... constants) {
  const auto all = std::tie(constants...);
  return composed_layer::conv(inputs, Run::convolution(constants...), activation_of(all), slope_of(all));
}

template <class... Constants>
struct Conv : Ops<ConvNames, Constants...> {
  static constexpr auto kVendor = &vendor::conv;
  static constexpr auto kVendorBackward = &vendor::conv_backward;

  static Convolution convolution(
      IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups, int64_t, double) {
    return {stride, padding, dilation, std::nullopt, groups};
  }
  static std::optional<Gradients> graph(const Tensor& dy, const Saved& saved, const Needs& needs, Constants... of) {
    return conv_graph<Conv>(dy, saved, needs, of...);
  }
  static Tensor composed(const LayerInputs& inputs, Constants... of) { return composed_conv<Conv>(inputs, of...); }
};

template <class... Constants>
struct ConvTranspose : Ops<ConvTransposeNames, Constants...> {
  static Convolution convolution(
      IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, IntArrayRef output_padding, int64_t groups,
      int64_t, double) {
    return {stride, padding, dilation, output_padding, groups};
  }
  static std::optional<Gradients> graph(const Tensor& dy, const Saved& saved, const Needs& needs, Constants... of) {
    return conv_graph<ConvTranspose>(dy, saved, needs, of...);
  }
  static Tensor composed(const LayerInputs& inputs, Constants... of) {
    return composed_conv<ConvTranspose>(inputs, of...);
  }
};

// ----------------------------------------------------------------------------------------------------- their nodes

Optional given(const Tensor& t) { return t.defined() ? Optional(t) : Optional(); }

// Whether a gradient asks for more than the kernels know.
bool is_general(const Tensor& dy) {
  return asks_for_graph(dy) || (!dy.key_set().has(c10::DispatchKey::Python) && may_be_zero_gradient_of_python(dy));
}

// What a layer whose output has a gradient of zeros hands on.
Gradients zeros_through(const variable_list& inputs, int64_t needs) {
  size_t edge = 0;  // those of a node count the tensors that it was given
  const auto zeros = [&](size_t i) -> Optional {
    if (!inputs[i].defined()) return std::nullopt;
    const size_t here = edge++;
    return needs >> i & 1 ? Optional(zero_gradient(here, inputs[i])) : std::nullopt;
  };
  return {zeros(0), zeros(1), zeros(2), zeros(3), zeros(4)};  // in this order: the braces say so
}

// Layer: the node itself, under whose name tensors show it.
template <class Layer, template <class...> class Kind, class... Constants>
struct Node : torch::autograd::Function<Layer> {
  using Run = Kind<Constants...>;
  static constexpr const char* kKept = "constants";
  static constexpr const char* kWeight = "weight";

  static Tensor layer(
      const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias, const Optional& residual,
      Constants... constants) {
    if (composed_layer::takes(x)) return Run::composed({x, v, g, bias, residual}, constants...);
    return Layer::apply(x, v, g, bias, residual, constants...);
  }

  static Tensor forward(
      AutogradContext* ctx, const Tensor& x, const Tensor& v, const Tensor& g, const Optional& bias,
      const Optional& residual, Constants... constants) {
    const KernelsOnly guard;
    const vendor::Outputs made = run_forward({x, v, g, bias, residual}, constants...);
    const Tensor &y = made.y, &norm = made.norm;
    // Beside the saved tensors, which must be as many as those of any other backend: a checkpoint may run the forward
    // again under one. Hooks on what is saved want memory back, and would not see it: then the backward makes it again.
    const bool hooked = at::SavedTensorDefaultHooks::get_hooks().has_value();
    if (made.w.defined() && x.requires_grad() && !hooked) ctx->saved_data[kWeight] = made.w;
    const auto all = std::tie(constants...);
    const bool reads_y = activation_of(all) != Activation::kNone;
    // The order is that of the node in Python.
    ctx->save_for_backward(
        {x, v, g, bias.value_or(Tensor()), residual.value_or(Tensor()), reads_y ? y : Tensor(), norm});
    ctx->set_materialize_grads(false);
    ctx->saved_data[kKept] = keep(constants...);
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& outputs) {
    variable_list found(5 + sizeof...(Constants));
    const Tensor& dy = outputs[0];
    if (!dy.defined()) return found;
    const variable_list saved = ctx->get_saved_variables();
    // The edges of a node count the tensors that it was given.
    int64_t needs = 0;
    for (size_t i = 0, edge = 0; i < 5; ++i) {
      if (saved[i].defined() && ctx->needs_input_grad(edge++)) needs |= int64_t{1} << i;
    }
    const auto weight = ctx->saved_data.find(kWeight);
    Tensor w = weight == ctx->saved_data.end() ? Tensor() : weight->second.toTensor();
    const Gradients gradients = std::apply(
        [&](const auto&... constants) { return gradients_of(dy, saved, w, needs, constants...); },
        constants_of<Constants...>(ctx->saved_data[kKept]));
    // Saved tensors go with the backward unless it is told to keep them; what is saved beside them stays with the node.
    if (!torch::autograd::get_current_graph_task_keep_graph()) {
      ctx->saved_data.erase(kWeight);
    } else if (w.defined()) {
      ctx->saved_data[kWeight] = w;
    }
    auto put = [&](size_t i, const Optional& gradient) {
      if (gradient && (needs >> i & 1)) found[i] = *gradient;
    };
    put(0, std::get<0>(gradients));
    put(1, std::get<1>(gradients));
    put(2, std::get<2>(gradients));
    put(3, std::get<3>(gradients));
    put(4, std::get<4>(gradients));
    return found;
  }

 private:
  static constexpr bool kHasVendor = requires { Run::kVendor; };

  // The vendor's way on CUDA tensors, where there is one; any other makes no weight, and knows none.
  static vendor::Outputs run_forward(const LayerInputs& of, Constants... constants) {
    if constexpr (kHasVendor) {
      if (of.x.is_cuda()) return Run::kVendor(of.x, of.v, of.g, of.bias, of.residual, constants...);
    }
    auto [y, norm] = Run::forward(of, constants...);
    return {y, norm, Tensor()};
  }

  static Gradients run_backward(
      const Tensor& dy, const Tensor& y, const Saved& saved, const Needs& needs, Constants... constants) {
    const auto& [x, v, g] = std::tie(saved.x, saved.v, saved.g);
    if constexpr (kHasVendor) {
      if (x.is_cuda()) return Run::kVendorBackward(dy, y, x, v, g, saved.norm, saved.w, needs, constants...);
    }
    return Run::backward(dy, y, x, v, g, saved.norm, needs.bits(), constants...);
  }

  static Gradients gradients_of(
      const Tensor& dy, const variable_list& tensors, Tensor& w, int64_t needs, Constants... constants) {
    if (!asks_for_graph(dy) && is_zero_gradient(dy)) return zeros_through(tensors, needs);
    const Optional bias = given(tensors[3]), residual = given(tensors[4]);
    const Tensor &y = tensors[5], &norm = tensors[6];
    const Saved saved{{tensors[0], tensors[1], tensors[2], bias, residual}, y, norm, w};
    const auto of_input = [&](size_t i) { return (needs >> i & 1) != 0; };
    const Needs asked{of_input(0), of_input(1) || of_input(2), of_input(3), of_input(4)};
    if (is_general(dy)) {
      if (layer_graph::takes(dy, saved)) {
        const std::optional<Gradients> found = Run::graph(dy, saved, asked, constants...);
        if (found) return *found;
      }
      return Run::general(dy, given(y), saved, norm, needs, constants...);
    }
    const KernelsOnly guard;
    Gradients found = run_backward(dy, y.defined() ? y : dy, saved, asked, constants...);
    if (!y.defined()) std::get<4>(found) = dy;
    return found;
  }
};

struct WNLinear : Node<WNLinear, Linear, int64_t, double> {};
struct WNLinearOfNorm : Node<WNLinearOfNorm, LinearOfNorm, int64_t, int64_t, double> {};
struct WNConv : Node<WNConv, Conv, IntArrayRef, IntArrayRef, IntArrayRef, int64_t, int64_t, double> {};
struct WNConvTranspose
    : Node<
          WNConvTranspose, ConvTranspose, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, int64_t, int64_t,
          double> {};

template <class Library>
void implement_layers(Library& library) {
  library.impl("linear", WNLinear::layer);
  library.impl("linear_of_norm", WNLinearOfNorm::layer);
  library.impl("conv", WNConv::layer);
  library.impl("conv_transpose", WNConvTranspose::layer);
}

}  // namespace
}  // namespace wnfused

// The schemas stand in wnfused/backends/native_autograd.py.
TORCH_LIBRARY_IMPL(wnfused_autograd, CompositeImplicitAutograd, library) { wnfused::implement_layers(library); }
// The same under vmap, which would take the ops sample by sample otherwise.
TORCH_LIBRARY_IMPL(wnfused_autograd, FuncTorchBatchedDecomposition, library) { wnfused::implement_layers(library); }

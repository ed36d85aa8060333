// The effective weight and its gradients are an op each, `weight` and `weight_backward`, with kernels and a node. A
// transform of torch.func calls an op once a level: a level of grad makes a node and calls the level below it, and the
// last one calls the kernel. Batches of vmap and tangents of jvp go through torch's own ops.
#include "autograd/weight.h"

#include <ATen/FuncTorchTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <memory>
#include <utility>
#include <vector>

#include "autograd/node.h"
#include "autograd/op.h"

namespace wnfused::weight {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Pair = std::tuple<Tensor, Tensor>;
using Forward = Pair(const Tensor& v, const Tensor& g, int64_t dim);
using Backward = Pair(const Tensor& dw, const Tensor& v, const Tensor& g, const Tensor& norm, int64_t dim);

// (w, norm) and (dv, dg), by whatever is next: a level of a transform, a node, the kernels.
Pair forward(const Tensor& v, const Tensor& g, int64_t dim) {
  static const auto run = op<Forward>("wnfused_autograd::weight");
  return run.call(v, g, dim);
}
Pair backward(const Tensor& dw, const Tensor& v, const Tensor& g, const Tensor& norm, int64_t dim) {
  static const auto run = op<Backward>("wnfused_autograd::weight_backward");
  return run.call(dw, v, g, norm, dim);
}

Pair forward_kernel(const Tensor& v, const Tensor& g, int64_t dim) {
  static const auto run = op<Forward>("wnfused_native::weight_norm");
  return run.call(v, g, dim);
}
Pair backward_kernel(const Tensor& dw, const Tensor& v, const Tensor& g, const Tensor& norm, int64_t dim) {
  static const auto run = op<Backward>("wnfused_native::weight_norm_backward");
  return run.call(dw, v, g, norm, dim);
}

// What they give, of tensors without entries.
Pair forward_shapes(const Tensor& v, const Tensor& /*g*/, int64_t dim) {
  c10::SymDimVector rows;
  if (dim != kWhole) rows.push_back(v.sym_size(dim));
  return {at::empty_like(v), at::empty_symint(rows, v.options())};
}
Pair backward_shapes(
    const Tensor& /*dw*/, const Tensor& v, const Tensor& g, const Tensor& /*norm*/, int64_t /*dim*/) {
  return {at::empty_like(v), at::empty_like(g)};
}

// One of these past autograd: of the level below, or the kernels.
template <class Signature, class... Inputs>
Pair below(Signature* run, const Inputs&... inputs) {
  const KernelsOnly guard;
  return run(inputs...);
}

template <class... Tensors>
bool have_tangents(const Tensors&... given) {
  return (given._fw_grad(0).defined() || ...);
}

constexpr c10::DispatchKeySet kTransforms{
    c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode};

// Whether no transform and no graph has to do with t.
bool is_constant(const Tensor& t) {
  return !is_wrapped(t) && !t.requires_grad() && !have_tangents(t);
}

template <class... Tensors>
bool are_recorded(const Tensors&... given) {
  return at::GradMode::is_enabled() && (given.requires_grad() || ...);
}

// The rows of v that `dim` numbers: what they are summed over, and the shape of one number for each.
struct Rows {
  std::vector<int64_t> spans, numbers;

  Rows(const Tensor& v, int64_t dim) : numbers(v.dim(), 1) {
    for (int64_t d = 0; d < v.dim(); ++d) {
      if (d != dim) spans.push_back(d);
    }
    if (dim != kWhole) numbers[dim] = v.size(dim);
  }

  // Rows of a single entry span no dim, and torch would sum over all of them.
  Tensor sum(const Tensor& t) const { return spans.empty() ? t : t.sum(spans, /*keepdim=*/true); }
  Tensor of(const Tensor& numbers_of_rows) const { return numbers_of_rows.reshape(numbers); }

  // Which rows have no norm; undefined where none is known to be so. A batch cannot be asked.
  Tensor zero(const Tensor& norm) const {
    const Tensor zero = of(norm) == 0;
    return is_transformed() || zero.any().item<bool>() ? zero : Tensor();
  }

  // 1 / ||v||, with a derivative by v. A row whose norm is 0 has none, of any order: it is ones before its norm is
  // taken, as 0 * inf would be NaN behind a mask.
  Tensor inverse_norm(const Tensor& v, const Tensor& zero) const {
    if (!zero.defined()) return sum(v.square()).rsqrt();
    return sum(v.masked_fill(zero, 1).square()).rsqrt().masked_fill(zero, 0);
  }
  // The same of norms that nobody differentiates.
  Tensor inverse(const Tensor& norm, const Tensor& zero) const {
    const Tensor inverse = of(norm).reciprocal();
    return zero.defined() ? inverse.masked_fill(zero, 0) : inverse;
  }
  // g, and 0 of a zero row, be it infinite.
  Tensor gain(const Tensor& g, const Tensor& zero) const { return zero.defined() ? of(g).masked_fill(zero, 0) : of(g); }
};

// While a node is made, no transform is on: torch has none of C++'s under them, since a node would not know which level
// it is of. These do: a level makes them for itself, when those below it have run.
class OneLevel {
 public:
  OneLevel() : transforms_(std::move(at::functorch::functorchTLSAccessor())) {}
  ~OneLevel() { at::functorch::functorchTLSAccessor() = std::move(transforms_); }
  OneLevel(const OneLevel&) = delete;
  OneLevel& operator=(const OneLevel&) = delete;

 private:
  std::unique_ptr<at::functorch::FuncTorchTLSBase> transforms_;
};

// What reference.weight_norm_backward has, as a function with derivatives of its own:
//
//   u = v / r,  s = <dw, u>,       dg = s,   dv = g / r (dw - s u)            (r = ||v||)
//
// For the cotangents a of dv and b of dg, with p = <a, u> and A = g / r (a - p u), which is this very function of a,
//
//   by dw:  A + b u
//   by g:   c = (<a, dw> - p s) / r
//   by v:   (b dw - s A - p dv) / r - (g c + b s) / r u
struct GradientsNode : torch::autograd::Function<GradientsNode> {
  static constexpr const char* kDim = "dim";

  // made: the gradients, of the level below.
  static variable_list forward(
      AutogradContext* ctx, const Tensor& dw, const Tensor& v, const Tensor& g, const Tensor& norm, int64_t dim,
      const Pair& made) {
    const auto& [dv, dg] = made;
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({dw, v, g, norm, dv, dg});
    ctx->saved_data[kDim] = dim;
    return {dv, dg};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& outputs) {
    const Tensor &a = outputs[0], &b_given = outputs[1];
    if (!a.defined() && !b_given.defined()) return variable_list(6);
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &dw = saved[0], &v = saved[1], &norm = saved[3], &dv = saved[4];
    const int64_t dim = ctx->saved_data[kDim].toInt();
    const Rows rows(v, dim);
    const Tensor zero = rows.zero(norm), g = rows.gain(saved[2], zero), s = rows.of(saved[5]);
    const bool graph = asks_for_graph(a.defined() ? a : b_given);
    const Tensor inverse = graph ? rows.inverse_norm(v, zero) : rows.inverse(norm, zero);
    Tensor by_dw, by_g, by_v, of_v;  // of_v: what is to be multiplied with -v / r^2
    const auto add = [](Tensor& sum, const Tensor& part) { sum = sum.defined() ? sum + part : part; };
    if (a.defined()) {
      const auto [made, found] = gradients(a, v, saved[2], norm, dim);
      const Tensor p = rows.of(found);
      by_dw = made;
      by_g = (rows.sum(a * dw) - p * s) * inverse;
      by_v = (s * made + p * dv) * -inverse;
      of_v = g * by_g;
    }
    if (b_given.defined()) {
      const Tensor b = rows.of(b_given), share = b * inverse;
      add(by_dw, share * v);
      add(by_v, share * dw);
      add(of_v, b * s);
    }
    by_v = by_v - of_v * inverse.square() * v;
    return {by_dw, by_v, by_g.defined() ? by_g.reshape(saved[2].sizes()) : by_g, Tensor(), Tensor(), Tensor()};
  }

  // By torch's own ops.
  static Pair composed(const Tensor& dw, const Tensor& v, const Tensor& g, const Tensor& norm, int64_t dim) {
    const Rows rows(v, dim);
    const auto [unit, scale] = unit_and_scale(rows, v, g, norm);
    const Tensor dg = rows.sum(dw * unit);
    return {scale * (dw - unit * dg), dg.reshape(g.sizes())};
  }

  // v / r and g / r. Where nobody differentiates them, as of gradients of each sample, past all transforms.
  static Pair unit_and_scale(const Rows& rows, const Tensor& v, const Tensor& g, const Tensor& norm) {
    if (!is_constant(v) || !is_constant(g) || !is_constant(norm)) {
      const Tensor zero = rows.zero(norm), inverse = rows.inverse_norm(v, zero);
      return {v * inverse, rows.gain(g, zero) * inverse};
    }
    const KernelsOnly guard;
    const c10::impl::ExcludeDispatchKeyGuard past_transforms(kTransforms);
    const Tensor zero = rows.zero(norm), inverse = rows.inverse(norm, zero);
    return {v * inverse, rows.gain(g, zero) * inverse};
  }

  static Pair recorded(const Tensor& dw, const Tensor& v, const Tensor& g, const Tensor& norm, int64_t dim) {
    if (have_tangents(dw, v, g)) return composed(dw, v, g, norm, dim);
    const Pair made = below(weight::backward, dw, v, g, norm, dim);
    if (!are_recorded(dw, v, g)) return made;
    const OneLevel guard;
    const variable_list recorded = apply(dw, v, g, norm, dim, made);
    return {recorded[0], recorded[1]};
  }
};

struct WeightNode : torch::autograd::Function<WeightNode> {
  static constexpr const char* kDim = "dim";
  static constexpr const char* kFreed = "freed";

  // made: the weight and the norms, of the level below. The norms are no output: nobody differentiates them.
  static Tensor forward(
      AutogradContext* ctx, const Tensor& v, const Tensor& g, int64_t dim, const Pair& made) {
    const auto& [w, norm] = made;
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({v, g, norm});
    ctx->saved_data[kDim] = dim;
    ctx->saved_data[kFreed] = false;
    return w;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& outputs) {
    if (!torch::autograd::get_current_graph_task_keep_graph()) ctx->saved_data[kFreed] = true;
    if (!outputs[0].defined()) return variable_list(4);
    const variable_list saved = ctx->get_saved_variables();
    const auto [dv, dg] = gradients(outputs[0], saved[0], saved[1], saved[2], ctx->saved_data[kDim].toInt());
    return {ctx->needs_input_grad(0) ? dv : Tensor(), ctx->needs_input_grad(1) ? dg : Tensor(), Tensor(), Tensor()};
  }

  // A backward that keeps no graph frees it, in whichever thread: the flag is there before it is read.
  static bool is_freed(const Tensor& w) {
    const auto node = w.grad_fn();
    return node && static_cast<torch::autograd::CppNode<WeightNode>&>(*node).ctx_.saved_data.at(kFreed).toBool();
  }

  static Pair composed(const Tensor& v, const Tensor& g, int64_t dim) {
    const Rows rows(v, dim);
    const Tensor norm = rows.sum(v.detach().square()).sqrt(), zero = norm == 0;
    const Tensor w = v * (rows.gain(g, zero) * rows.inverse_norm(v, zero));
    return {w, dim == kWhole ? norm.reshape({}) : norm.reshape({v.size(dim)})};
  }

  static Pair recorded(const Tensor& v, const Tensor& g, int64_t dim) {
    if (have_tangents(v, g)) return composed(v, g, dim);
    const Pair made = below(weight::forward, v, g, dim);
    if (!are_recorded(v, g)) return made;
    const OneLevel guard;
    return {apply(v, g, dim, made), std::get<1>(made)};
  }
};

}  // namespace

Tensor of(const Tensor& v, const Tensor& g, int64_t dim) { return std::get<0>(forward(v, g, dim)); }

Tensor shared(Tensor& w, const Tensor& v, const Tensor& g, int64_t dim) {
  if (!w.defined() || WeightNode::is_freed(w)) w = of(v, g, dim);
  return w;
}

Pair gradients(const Tensor& dw, const Tensor& v, const Tensor& g, const Tensor& norm, int64_t dim) {
  // torch.autograd.grad's own batches, which come before any op's rules.
  if (dw.key_set().has(c10::DispatchKey::Batched)) return GradientsNode::composed(dw, v, g, norm, dim);
  return backward(dw, v, g, norm, dim);
}

}  // namespace wnfused::weight

// The schemas stand in wnfused/backends/native_autograd.py.
TORCH_LIBRARY_IMPL(wnfused_autograd, CPU, library) {
  library.impl("weight", wnfused::weight::forward_kernel);
  library.impl("weight_backward", wnfused::weight::backward_kernel);
}
TORCH_LIBRARY_IMPL(wnfused_autograd, Meta, library) {
  library.impl("weight", wnfused::weight::forward_shapes);
  library.impl("weight_backward", wnfused::weight::backward_shapes);
}
TORCH_LIBRARY_IMPL(wnfused_autograd, Autograd, library) {
  library.impl("weight", wnfused::weight::WeightNode::recorded);
  library.impl("weight_backward", wnfused::weight::GradientsNode::recorded);
}
TORCH_LIBRARY_IMPL(wnfused_autograd, FuncTorchBatched, library) {
  library.impl("weight", wnfused::weight::WeightNode::composed);
  library.impl("weight_backward", wnfused::weight::GradientsNode::composed);
}

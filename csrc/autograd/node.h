// What the nodes of layers and of stages share.
#pragma once

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace wnfused {

// Kernels run below autograd, and autocast must not touch what they do inside: dtypes are settled before.
struct KernelsOnly {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// Where an op that Python implements is called past all dispatch: gradients of vmap would otherwise need a rule for
// batches of this very op.
constexpr c10::DispatchKeySet kPastDispatch(c10::DispatchKey::CPU);

// Whether a transform of torch.func is on, whichever of its levels runs.
inline bool is_transformed() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

// Whether t stands for another tensor, whose entries nobody can read here: of a transform, of vmap, of a subclass.
inline bool is_wrapped(const at::Tensor& t) {
  constexpr c10::DispatchKeySet wrappers{
      c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
      c10::DispatchKey::Batched, c10::DispatchKey::Functionalize};
  return t.key_set().has_any(wrappers);
}

// Many gradients at once, of vmap.
inline bool is_batch(const at::Tensor& dy) {
  const c10::DispatchKeySet keys = dy.key_set();
  return keys.has(c10::DispatchKey::Batched) || keys.has(c10::DispatchKey::FuncTorchBatched);
}

// Whether the gradients for dy are to have derivatives of their own, or dy is many of them.
inline bool asks_for_graph(const at::Tensor& dy) {
  return is_batch(dy) || at::GradMode::is_enabled() || dy._fw_grad(0).defined();
}

}  // namespace wnfused

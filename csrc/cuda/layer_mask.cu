// The op layer_mask_ on CUDA tensors.
#include "cuda/layer_mask.h"

#include <torch/csrc/stable/library.h>

#include <optional>

#include "cuda/layer_map.h"

namespace wnfused::gpu {
namespace {

using Optional = std::optional<Tensor>;

template <class N>
Tensor enqueue(const Tensor& dy, const Optional& y, const Optional& dz, int64_t channels, int64_t inner, double slope,
               bool sums) {
  const OnDevice here(dy);
  const auto pointer = [](const Tensor& tensor) { return static_cast<N*>(tensor.mutable_data_ptr()); };
  LayerMaskParams<N> params{};
  params.dy = pointer(dy);
  params.y = y ? pointer(*y) : nullptr;
  params.dz = dz ? pointer(*dz) : nullptr;
  params.count = dy.numel();
  params.channels = channels;
  params.inner = inner;
  params.slope = static_cast<float>(slope);
  params.shares = layer_mask_shares(params);
  const Tensor partial = empty_like_on(dy, {sums ? params.shares : 0, channels}, ScalarType::Float);
  params.partial = sums ? static_cast<float*>(partial.mutable_data_ptr()) : nullptr;
  check(enqueue_layer_mask(params, here.queue));
  return partial;
}

// `channel`: the dim that the bias goes along. Gives [shares, channels], no shares unless `sums`.
Tensor layer_mask_(const Tensor& dy, const Optional& y, const Optional& dz, int64_t channel, double slope, bool sums) {
  const char* op = "layer_mask_";
  check_devices(op, {&dy, y ? &*y : &dy, dz ? &*dz : &dy});
  STD_TORCH_CHECK(dy.numel() > 0, op, ": dy is empty");
  const int64_t inner = inner_of(op, dy, channel);
  for (const Optional* other : {&y, &dz})
    STD_TORCH_CHECK(!*other || ((*other)->numel() == dy.numel() && same_layout(**other, dy) &&
                                (*other)->scalar_type() == dy.scalar_type()),
                    op, ": y and dz must be as dy is");
  return with_entry(
      op, dy, [&](auto entry) { return enqueue<decltype(entry)>(dy, y, dz, dy.size(channel), inner, slope, sums); });
}

}  // namespace
}  // namespace wnfused::gpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CUDA, m) { m.impl("layer_mask_", TORCH_BOX(&wnfused::gpu::layer_mask_)); }

// The op layer_epilogue_ on CUDA tensors.
#include "cuda/layer_epilogue.h"

#include <torch/csrc/stable/library.h>

#include <optional>

#include "activation_number.h"
#include "cuda/layer_map.h"

namespace wnfused::gpu {
namespace {

using Optional = std::optional<Tensor>;

template <class N>
void enqueue(const Tensor& y, const Optional& bias, const Optional& residual, int64_t channels, int64_t inner,
             int64_t activation, double slope) {
  const OnDevice here(y);
  const auto pointer = [](const Tensor& tensor) { return static_cast<N*>(tensor.mutable_data_ptr()); };
  const LayerEpilogueParams<N> params{pointer(y),
                                      bias ? pointer(*bias) : nullptr,
                                      residual ? pointer(*residual) : nullptr,
                                      y.numel(),
                                      channels,
                                      inner,
                                      activation != Activation::kNone,
                                      activation == Activation::kLeakyRelu ? static_cast<float>(slope) : 0.0f};
  check(enqueue_layer_epilogue(params, here.queue));
}

// `channel`: the dim that the bias goes along.
void layer_epilogue_(const Tensor& y, const Optional& bias, const Optional& residual, int64_t channel,
                     int64_t activation, double slope) {
  const char* op = "layer_epilogue_";
  check_devices(op, {&y, bias ? &*bias : &y, residual ? &*residual : &y});
  const int64_t inner = inner_of(op, y, channel), channels = y.size(channel);
  STD_TORCH_CHECK(
      !bias || (bias->numel() == channels && bias->is_contiguous() && bias->scalar_type() == y.scalar_type()), op,
      ": bias must be contiguous, in y's dtype, with ", channels, " entries");
  STD_TORCH_CHECK(!residual || (residual->numel() == y.numel() && same_layout(*residual, y) &&
                                residual->scalar_type() == y.scalar_type()),
                  op, ": residual must be as y is");
  if (y.numel() == 0) return;
  with_entry(op, y,
             [&](auto entry) { enqueue<decltype(entry)>(y, bias, residual, channels, inner, activation, slope); });
}

}  // namespace
}  // namespace wnfused::gpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CUDA, m) {
  m.impl("layer_epilogue_", TORCH_BOX(&wnfused::gpu::layer_epilogue_));
}

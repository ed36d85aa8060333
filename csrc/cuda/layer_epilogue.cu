// The op layer_epilogue_ on CUDA tensors.
#include "cuda/layer_epilogue.h"

#include <torch/csrc/stable/library.h>

#include <optional>

#include "cuda/torch.h"
#include "layout.h"

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
                                      activation != 0,
                                      activation == 2 ? static_cast<float>(slope) : 0.0f};
  check(enqueue_layer_epilogue(params, here.queue));
}

// `channel`: the dim that the bias goes along.
void layer_epilogue_(const Tensor& y, const Optional& bias, const Optional& residual, int64_t channel,
                     int64_t activation, double slope) {
  const char* op = "layer_epilogue_";
  check_devices(op, {&y, bias ? &*bias : &y, residual ? &*residual : &y});
  STD_TORCH_CHECK(channel >= 0 && channel < y.dim(), op, ": dim ", channel, " is out of range");
  const int64_t channels = y.size(channel);
  int64_t inner = 1;
  if (y.is_contiguous()) {
    for (int64_t d = channel + 1; d < y.dim(); ++d) inner *= y.size(d);
  } else {
    STD_TORCH_CHECK(channel == 1 && has_dense_rows(y), op, ": y must be dense");
  }
  STD_TORCH_CHECK(!bias || (bias->numel() == channels && bias->is_contiguous() && bias->scalar_type() == y.scalar_type()),
                  op, ": bias must be contiguous, in y's dtype, with ", channels, " entries");
  STD_TORCH_CHECK(!residual || (residual->numel() == y.numel() && same_layout(*residual, y) &&
                                residual->scalar_type() == y.scalar_type()),
                  op, ": residual must be as y is");
  if (y.numel() == 0) return;
  switch (y.scalar_type()) {
    case ScalarType::Float:
      return enqueue<float>(y, bias, residual, channels, inner, activation, slope);
    case ScalarType::BFloat16:
      return enqueue<BFloat>(y, bias, residual, channels, inner, activation, slope);
    case ScalarType::Half:
      return enqueue<Half>(y, bias, residual, channels, inner, activation, slope);
    default:
      STD_TORCH_CHECK(false, op, ": y must be float32, bfloat16 or float16");
  }
}

}  // namespace
}  // namespace wnfused::gpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CUDA, m) {
  m.impl("layer_epilogue_", TORCH_BOX(&wnfused::gpu::layer_epilogue_));
}

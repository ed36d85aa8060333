#include "cpu/ops/kept_banks.h"

#include <algorithm>

#include "cpu/layer/tensor.h"
#include "cpu/machine/workspace.h"

namespace wnfused::cpu {

bool run_kept_layer(const ConvLayer& layer, const std::optional<Tensor>& residual, const Tensor& y, float* norms,
                    KeptBanks* banks) {
  if (!banks) return run_conv_layer(layer, residual, y, norms);
  const KeptFloats floats = kept_floats(layer);
  const auto suits = [&](const Tensor& bank) { return bank.numel() == floats.sum(); };
  const auto known = std::find_if(banks->known.begin(), banks->known.end(), suits);
  const bool packed = known != banks->known.end();
  const Tensor memory = packed ? *known : lasting_floats(floats.sum());
  float* weights = static_cast<float*>(memory.mutable_data_ptr());
  const KeptBank kept{{weights, weights + floats.weights}, packed};
  if (!run_conv_layer(layer, residual, y, norms, &kept)) return false;
  if (!packed) banks->added = memory;
  return true;
}

}  // namespace wnfused::cpu

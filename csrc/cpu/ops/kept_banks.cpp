#include "cpu/ops/kept_banks.h"

#include <algorithm>

#include "cpu/layer/tensor.h"
#include "cpu/machine/workspace.h"

namespace wnfused::cpu {

bool is_worth_keeping(const ConvShape& shape, Method method) {
  constexpr int64_t kWeights = 1 << 16, kWinogradWeights = 3 << 14, kTiles = 8;
  if (shape.is_depthwise()) return false;
  if (method != Method::kWinograd4) return shape.inputs * shape.outputs / shape.groups * shape.taps() >= kWeights;
  // Four times as many numbers as v has, read for so many tiles.
  const int64_t tiles = shape.images * shape.size.level * divide_up(shape.size.row, 4) * divide_up(shape.size.column, 4);
  return shape.inputs * shape.outputs >= kWinogradWeights && tiles <= kTiles;
}

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

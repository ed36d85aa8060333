// Weights that do not change for a while, packed once: a forward of conv_layer.h takes its bank from here, and packs
// one only where there is none for its method. Which method that is depends on x's size, so a layer may have several
// banks.
#pragma once

#include <vector>

#include "cpu/conv_layer/conv_layer.h"

namespace wnfused::cpu {

// Of one layer: the banks that calls before this one packed, and the one that it adds.
struct KeptBanks {
  const std::vector<torch::stable::Tensor>& known;
  std::optional<torch::stable::Tensor> added;
};

// run_conv_layer; banks may be null. With them the norms are filled only where a bank is packed.
bool run_kept_layer(const ConvLayer& layer, const std::optional<torch::stable::Tensor>& residual,
                    const torch::stable::Tensor& y, float* norms, KeptBanks* banks);

}  // namespace wnfused::cpu

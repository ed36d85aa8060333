#include "cpu/ops/kept_banks.h"

#include <algorithm>

#include "cpu/layer/tensor.h"
#include "cpu/machine/workspace.h"

namespace wnfused::cpu {
namespace {

// Behind the bank and the bias stands by which method they are packed.
constexpr int64_t kMarkFloats = 1;

float mark_of(Method method) { return static_cast<float>(method); }

// The bank of these weights by this method, packed before; none yet where there is none of its mark and size.
std::optional<Tensor> find(const std::vector<Tensor>& known, int64_t floats, Method method) {
  const auto suits = [&](const Tensor& bank) {
    return bank.scalar_type() == torch::headeronly::ScalarType::Float && bank.is_contiguous() &&
           bank.numel() == floats + kMarkFloats && entries<float>(bank)[floats] == mark_of(method);
  };
  const auto found = std::find_if(known.begin(), known.end(), suits);
  return found == known.end() ? std::nullopt : std::optional(*found);
}

}  // namespace

bool run_kept_layer(const ConvLayer& layer, const std::optional<Tensor>& residual, const Tensor& y, float* norms,
                    KeptBanks* banks) {
  if (!banks) return run_conv_layer(layer, residual, y, norms);
  const KeptFloats floats = kept_floats(layer);
  const std::optional<Tensor> known = find(banks->known, floats.sum(), layer.method);
  const bool packed = known.has_value();
  const Tensor memory = packed ? *known : lasting_floats(floats.sum() + kMarkFloats);
  float* weights = const_cast<float*>(entries<float>(memory));  // a known bank is read only
  if (!packed) weights[floats.sum()] = mark_of(layer.method);
  const KeptBank kept{{weights, weights + floats.weights}, packed};
  if (!run_conv_layer(layer, residual, y, norms, &kept)) return false;
  if (!packed) banks->added = memory;
  return true;
}

}  // namespace wnfused::cpu

#include "cpu/choice/choice.h"

#include "cpu/choice/rules.h"

namespace wnfused::cpu {

ConvChoice choose_forward(const ConvTraits& layer, const ForwardAsks& asks) {
  if (!layer.shape.is_sound()) return {};
  // Kept banks are faster than any other way, on few pixels too, but for planes, strips and rows.
  if (asks.kept && !planes_outdo_banks(layer) && !suits_strips(layer, asks.passes) && !rows_outdo_banks(layer)) {
    const std::optional<Method> method = own_method(layer, asks);
    if (method && is_worth_keeping(layer.shape, *method)) return {ConvWay::kOwn, *method, true};
  }
  if (suits_planes(layer)) return {ConvWay::kPlanes};
  if (suits_strips(layer, asks.passes)) return {ConvWay::kStrips};
  if (suits_unfolding(layer)) return {ConvWay::kUnfolded};
  if (const std::optional<Method> method = own_method(layer, {asks.passes, false})) return {ConvWay::kOwn, *method};
  return {};
}

ConvChoice choose_backward(const ConvTraits& layer, const Needs& needs) {
  if (!layer.shape.is_sound() || !(needs.x || needs.v)) return {};
  if (suits_planes_backward(layer)) return {ConvWay::kPlanes};
  if (suits_strips_backward(layer, needs)) return {ConvWay::kStrips};
  if (suits_unfolding_backward(layer, needs)) return {ConvWay::kUnfolded};
  if (const std::optional<Method> method = own_method_backward(layer, needs)) return {ConvWay::kOwn, *method};
  return {};
}

}  // namespace wnfused::cpu

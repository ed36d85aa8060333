// The activations of layers and their masks.
#pragma once

#include "cuda/target.h"

namespace wnfused::gpu {

// `slope`: of what is not positive.
WNFUSED_DEVICE float activated(float value, float slope) {
  // An infinity times 0 would be NaN.
  return value <= 0.0f ? (slope == 0.0f ? 0.0f : value * slope) : value;
}

// dy where the activation passed it: y NaN passes a ReLU's, as torch has it, and not a leaky one's.
WNFUSED_DEVICE float masked(float dy, float y, float slope) {
  if (slope == 0.0f) return y <= 0.0f ? 0.0f : dy;
  return y > 0.0f ? dy : dy * slope;
}

}  // namespace wnfused::gpu

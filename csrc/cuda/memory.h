// Values in global memory whose dtype is known at run time only: float32 or bfloat16.
#pragma once

#include "cuda/target.h"

namespace wnfused::gpu {

struct Values {
  void* data;
  bool bfloat16;
};

WNFUSED_DEVICE float load_value(const Values& values, int64_t index) {
  return values.bfloat16 ? float_of_bits(static_cast<uint32_t>(load_global<uint16_t>(
                                             static_cast<const uint16_t*>(values.data) + index))
                                         << 16)
                         : load_global<float>(static_cast<const float*>(values.data) + index);
}

WNFUSED_DEVICE void store_value(const Values& values, int64_t index, float value) {
  if (values.bfloat16)
    store_global<uint16_t>(static_cast<uint16_t*>(values.data) + index,
                           static_cast<uint16_t>(pack_bf16(value, 0.0f)));
  else
    store_global<float>(static_cast<float*>(values.data) + index, value);
}

// A map [N, C, H, W] of any strides, in elements.
struct ExternalMap {
  Values values;
  int64_t image, channel, row, column;
};

}  // namespace wnfused::gpu

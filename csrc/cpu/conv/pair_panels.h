// Panels of bfloat16, which products of pairs read (pairs.h).
#pragma once

#include "cpu/products/pairs.h"

namespace wnfused::cpu::WNFUSED_ISA {

// A multiple of 16.
WNFUSED_INLINE void clear_elements(uint16_t* target, int64_t count) {
  for (; count >= 2 * kLanes; count -= 2 * kLanes, target += 2 * kLanes) store_bits(target, zero());
  if (count > 0) store(target, zero());
}

// `count` pixels of `channels` channels, `source_stride` apart, as pixels of `padded`, at least as many.
inline void copy_padded(const uint16_t* source, int64_t source_stride, int64_t count, int64_t channels, int64_t padded,
                        uint16_t* target) {
  if (channels == padded && source_stride == channels) {
    __builtin_memcpy(target, source, count * channels * sizeof(uint16_t));
    return;
  }
  if (channels % kLanes == 0) {
    for (int64_t i = 0; i < count; ++i, source += source_stride, target += padded) {
      for (int64_t c = 0; c < channels; c += kLanes)
        __builtin_memcpy(target + c, source + c, kLanes * sizeof(uint16_t));
      for (int64_t c = channels; c < padded; c += kLanes) __builtin_memset(target + c, 0, kLanes * sizeof(uint16_t));
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i, source += source_stride, target += padded) {
    for (int64_t c = 0; c < channels; ++c) target[c] = source[c];
    for (int64_t c = channels; c < padded; ++c) target[c] = 0;
  }
}

}  // namespace wnfused::cpu::WNFUSED_ISA

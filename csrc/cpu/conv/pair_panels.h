// Panels of bfloat16, which products of pairs read (pairs.h).
#pragma once

#include "cpu/products/pairs.h"

namespace wnfused::cpu::WNFUSED_ISA {

// A multiple of 16.
WNFUSED_INLINE void clear_elements(uint16_t* target, int64_t count) {
  for (; count >= 2 * kLanes; count -= 2 * kLanes, target += 2 * kLanes) store_bits(target, zero());
  if (count > 0) store(target, zero());
}

}  // namespace wnfused::cpu::WNFUSED_ISA

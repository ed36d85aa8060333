// What convolutions read and their outputs are stored as: operands. Floats in the map's own layout, or bfloat16
// [N, H, W, C], whose last block of channels may not be a whole one.
#pragma once

#include "cpu/vec/vec.h"

namespace wnfused::cpu::WNFUSED_ISA {

template <class G>
WNFUSED_INLINE Block load_operand(const G& geometry, const float* map, int64_t pixel, int64_t channel_block) {
  return load(map + pixel * geometry.padded_outputs + channel_block * kLanes);
}

template <class G>
WNFUSED_INLINE void store_operand(const G& geometry, float* map, int64_t pixel, int64_t channel_block,
                                  const Block& value) {
  store(map + pixel * geometry.padded_outputs + channel_block * kLanes, value);
}

template <class G>
WNFUSED_INLINE int64_t lanes_of_block(const G& geometry, int64_t channel_block) {
  const int64_t left = geometry.channels - channel_block * kLanes;
  return left < kLanes ? left : kLanes;
}

template <class G>
WNFUSED_INLINE Block load_operand(const G& geometry, const uint16_t* map, int64_t pixel, int64_t channel_block) {
  const uint16_t* source = map + pixel * geometry.channels + channel_block * kLanes;
  const int64_t lanes = lanes_of_block(geometry, channel_block);
  if (lanes == kLanes) return load(source);
  uint16_t values[kLanes] = {};
  for (int64_t i = 0; i < lanes; ++i) values[i] = source[i];
  return load(values);
}

// Denormals become zero where the processor converts.
WNFUSED_INLINE void store_rounded(uint16_t* target, const Block& value) {
#if defined(WNFUSED_CONVERTS_BFLOAT16)
  const __m256i converted = (__m256i)_mm512_cvtneps_pbh(value.part[0]);
  __builtin_memcpy(target, &converted, sizeof converted);
#else
  store(target, value);
#endif
}

// Two, one behind the other.
WNFUSED_INLINE void store_rounded(uint16_t* target, const Block& first, const Block& second) {
#if defined(WNFUSED_CONVERTS_BFLOAT16)
  const __m512i converted = (__m512i)_mm512_cvtne2ps_pbh(second.part[0], first.part[0]);
  __builtin_memcpy(target, &converted, sizeof converted);
#else
  store(target, first);
  store(target + kLanes, second);
#endif
}

template <class G>
WNFUSED_INLINE void store_operand(const G& geometry, uint16_t* map, int64_t pixel, int64_t channel_block,
                                  const Block& value) {
  uint16_t* target = map + pixel * geometry.channels + channel_block * kLanes;
  const int64_t lanes = lanes_of_block(geometry, channel_block);
  if (lanes == kLanes) return store_rounded(target, value);
  uint16_t values[kLanes];
  store(values, value);
  for (int64_t i = 0; i < lanes; ++i) target[i] = values[i];
}

}  // namespace wnfused::cpu::WNFUSED_ISA

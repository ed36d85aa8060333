// How a convolution ends: what becomes of its output, one pixel and block of 16 channels at a time.
#pragma once

#include "cpu/conv/operands.h"
#include "cpu/layer/layer.h"

namespace wnfused::cpu::WNFUSED_ISA {

struct SavedMap {
  void* data;  // [N, H, W, C], null: do not save
  bool bfloat16;
};

// What becomes of a convolution's output before it is stored.
enum class Ending {
  kRelu,      // relu(acc + bias)                   a, from h
  kResidual,  // factor (other + acc + bias)        the next h, from a; other is h
  kMask,      // acc where a passed the ReLU, else 0  da, from dh
  kAdd,       // factor other + acc                 dh of the block, from da; other is dh
  kLayer,     // act(acc + bias + other)            y of a single layer; other may be null
};

constexpr bool is_operand(Ending ending) {
  return ending == Ending::kRelu || ending == Ending::kMask || ending == Ending::kLayer;
}

// What a convolution reads is an Operand: float, in the map's own layout, or bfloat16 (uint16_t), [N, H, W, C].
template <class Operand>
struct ConvEpilogue {
  Operand* operand;      // kRelu, kMask, kLayer: the output. Else, where operands are bfloat16, the rounded copy of it
  float* out;            // kResidual, kAdd
  const float* other;    // kResidual, kAdd, kLayer
  const Operand* mask;   // kMask: a
  const float* bias;     // kRelu, kResidual, kLayer: null for none
  Operand* fresh;        // the output again, where its lines are to be fetched before they are written; else null
  float factor;          // kLayer: the slope below 0
  Activation activation; // kLayer
  bool round;            // float operands: rounded to bfloat16 all the same
  SavedMap saved;
};

template <class G>
inline void save_block(const G& geometry, const SavedMap& saved, int64_t pixel, int64_t channel_block,
                       const Block& value) {
  const int64_t left = geometry.outputs - channel_block * kLanes, lanes = left < kLanes ? left : kLanes;
  const int64_t offset = pixel * geometry.outputs + channel_block * kLanes;
  if (lanes == kLanes) {
    if (saved.bfloat16) store(static_cast<uint16_t*>(saved.data) + offset, value);
    else store(static_cast<float*>(saved.data) + offset, value);
    return;
  }
  float values[kLanes];
  store(values, value);
  if (saved.bfloat16) {
    uint16_t* target = static_cast<uint16_t*>(saved.data) + offset;
    for (int64_t i = 0; i < lanes; ++i) target[i] = to_bfloat16(values[i]);
  } else {
    __builtin_memcpy(static_cast<float*>(saved.data) + offset, values, lanes * sizeof(float));
  }
}

WNFUSED_INLINE Block activated(const Block& value, Activation activation, float slope) {
  if (activation == Activation::kNone) return value;
  return activation == Activation::kRelu ? relu(value) : leaky_mask(value, value, splat(slope));
}

// What a convolution's sum becomes, before a ReLU or an activation. `beside`: other, or kMask: a.
template <Ending kEnding>
WNFUSED_INLINE Block ended(const Block& accumulator, const Block& bias, const Block& beside, const Block& factor) {
  if constexpr (kEnding == Ending::kRelu) return accumulator + bias;
  else if constexpr (kEnding == Ending::kResidual) return factor * (beside + (accumulator + bias));
  else if constexpr (kEnding == Ending::kMask) return relu_mask(beside, accumulator);
  else if constexpr (kEnding == Ending::kAdd) return multiply_add(factor, beside, accumulator);
  else return beside + (accumulator + bias);
}

// The epilogue of one pixel and block of channels. `poison` gathers 0 * value: zero while everything is finite. A
// ReLU's value is looked at before it: a transform may overflow to -infinity where the convolution is finite, and 0
// would hide that. What a mask lets pass shows in dh.
template <Ending kEnding, class G, class Operand>
WNFUSED_INLINE void finish_pixel(const G& geometry, const ConvEpilogue<Operand>& epilogue, int64_t pixel,
                                 int64_t channel_block, const Block& accumulator, const Block& bias, Block& poison) {
  constexpr bool kPairs = sizeof(Operand) == sizeof(uint16_t);
  const int64_t offset = pixel * geometry.padded_outputs + channel_block * kLanes;
  Block value;
  if constexpr (kEnding == Ending::kMask) {
    value = ended<kEnding>(accumulator, bias, load_operand(geometry, epilogue.mask, pixel, channel_block), zero());
  } else if constexpr (is_operand(kEnding)) {
    const bool alone = kEnding == Ending::kRelu || !epilogue.other;
    value = alone ? ended<Ending::kRelu>(accumulator, bias, zero(), zero())
                  : ended<kEnding>(accumulator, bias, load(epilogue.other + offset), zero());
  } else {
    value = ended<kEnding>(accumulator, bias, load(epilogue.other + offset), splat(epilogue.factor));
  }
  if constexpr (kEnding != Ending::kMask) poison = multiply_add(value, zero(), poison);
  if constexpr (kEnding == Ending::kRelu) value = relu(value);
  if constexpr (kEnding == Ending::kLayer) value = activated(value, epilogue.activation, epilogue.factor);
  if constexpr (!is_operand(kEnding)) store(epilogue.out + offset, value);
  else if (!kPairs && epilogue.round) value = round_to_bfloat16(value);
  if constexpr (is_operand(kEnding) || kPairs)
    store_operand(geometry, epilogue.operand, pixel, channel_block, value);
  if constexpr (kEnding != Ending::kLayer)
    if (epilogue.saved.data) save_block(geometry, epilogue.saved, pixel, channel_block, value);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

// A layer's activation, which ops are given as a number: its place in wnfused.reference.ACTIVATIONS.
#pragma once

#include <cstdint>

namespace wnfused {

enum class Activation : int64_t { kNone, kRelu, kLeakyRelu };

constexpr const char* kActivationNames[] = {"none", "relu", "leaky_relu"};

constexpr bool operator==(int64_t number, Activation activation) { return number == static_cast<int64_t>(activation); }
constexpr bool operator!=(int64_t number, Activation activation) { return !(number == activation); }

}  // namespace wnfused

// What the kernels and those who prepare their calls both know of vectors. Everything is counted in blocks of 16
// floats, whatever the width of the machine's vectors (vec.h).
#pragma once

#include <cstdint>

namespace wnfused::cpu {

constexpr int kLanes = 16;

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// float or bfloat16 entries; arithmetic is float.
struct Values {
  void* data;
  bool bfloat16;
};

}  // namespace wnfused::cpu

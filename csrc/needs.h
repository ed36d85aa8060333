// Which gradients of a layer are asked for: the bits of a backward op's `needs` (wnfused/backends/asked.py).
#pragma once

#include <cstdint>

namespace wnfused {

struct Needs {
  bool x, v, bias, residual;  // v: and g

  static Needs of(int64_t bits) { return {(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0}; }

  bool of_input_alone() const { return x && !v && !bias; }  // and maybe by the residual

  int64_t bits() const { return x + 2 * v + 4 * bias + 8 * residual; }
};

}  // namespace wnfused

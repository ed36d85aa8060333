// cpu_bounds: numbers of this library that its callers must know, for wnfused/backends/native.py.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cpu/choice/choice.h"
#include "cpu/orthonormal/orthonormal.h"

namespace wnfused::cpu {
namespace {

std::tuple<int64_t, int64_t> cpu_bounds() { return {kFewestPixels, kMaxOrthonormalRows}; }

}  // namespace
}  // namespace wnfused::cpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CompositeExplicitAutograd, m) {
  m.impl("cpu_bounds", TORCH_BOX(&wnfused::cpu::cpu_bounds));
}

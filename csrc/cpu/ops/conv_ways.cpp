// cpu_conv_ways: who multiplies a convolution (choice.h), for wnfused/backends/native.py and the tests.
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "cpu/choice/choice.h"
#include "cpu/ops/conv_extents.h"

namespace wnfused::cpu {
namespace {

const char* name_of(const ConvChoice& choice) {
  switch (choice.way) {
    case ConvWay::kPlanes: return "planes";
    case ConvWay::kStrips: return "strips";
    case ConvWay::kUnfolded: return "unfolded";
    case ConvWay::kOwn: return name_of(choice.method);
    case ConvWay::kVendor: break;
  }
  return "vendor";
}

Triple triple_at(const Extents& values, size_t first) {
  return {values.at(first), values.at(first + 1), values.at(first + 2)};
}

// Forward, with an activation, and backward, with every gradient.
std::tuple<std::string, std::string> cpu_conv_ways(
    const Extents& maps, const Extents& kernel, const Extents& stride, const Extents& padding, const Extents& dilation,
    int64_t groups, int64_t dims, bool transposed, bool last, bool rows, bool bfloat16, bool plain, bool kept) {
  const ConvShape shape{maps.at(0),           maps.at(1),           maps.at(2),
                        triple_at(maps, 3),   triple_at(kernel, 0), triple_at(stride, 0),
                        triple_at(padding, 0), triple_at(dilation, 0), groups};
  const ConvTraits layer{shape, transposed, dims, last, rows, bfloat16, plain};
  constexpr Needs kAll = {true, true, true, true};
  return {name_of(choose_forward(layer, {true, kept})), name_of(choose_backward(layer, kAll))};
}

}  // namespace
}  // namespace wnfused::cpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CompositeExplicitAutograd, m) {
  m.impl("cpu_conv_ways", TORCH_BOX(&wnfused::cpu::cpu_conv_ways));
}

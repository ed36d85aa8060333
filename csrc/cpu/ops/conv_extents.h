// Extents of one to three dims as the ops give them, and the Triples of the kernels (window.h).
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/window/window.h"

namespace wnfused::cpu {

using Extents = std::vector<int64_t>;

// Those from `first` on: the last ones are rows and columns, and `missing` stands for what is not there.
template <class Sizes>
Triple triple_of(const Sizes& extents, size_t first, int64_t missing) {
  const size_t dims = extents.size() - first, last = extents.size() - 1;
  return {dims > 2 ? extents[first] : missing, dims > 1 ? extents[last - 1] : missing, extents[last]};
}

// Of a tensor with so many dims, the first two among them.
inline Extents map_sizes(int64_t images, int64_t channels, const Triple& size, int64_t dims) {
  Extents sizes{images, channels};
  if (dims > 4) sizes.push_back(size.level);
  if (dims > 3) sizes.push_back(size.row);
  sizes.push_back(size.column);
  return sizes;
}

// Below it no sum of a few products overflows.
constexpr int64_t kFarExtent = int64_t{1} << 31;

inline bool are_near(const Extents& extents) {
  return std::all_of(extents.begin(), extents.end(),
                     [](int64_t extent) { return -kFarExtent < extent && extent < kFarExtent; });
}

}  // namespace wnfused::cpu

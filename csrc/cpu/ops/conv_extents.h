// Extents of one to three dims as the ops give them, and the Triples of the kernels (window.h).
#pragma once

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

// For ops that take a layer's shape as lists: images, inputs, outputs and the extents of x; windows. Always three extents.
inline ConvShape listed_shape(const Extents& maps, const Extents& kernel, const Extents& stride, const Extents& padding,
                              const Extents& dilation, int64_t groups) {
  const auto triple = [](const Extents& values, size_t first) {
    return Triple{values.at(first), values.at(first + 1), values.at(first + 2)};
  };
  return {maps.at(0),        maps.at(1),         maps.at(2),          triple(maps, 3), triple(kernel, 0),
          triple(stride, 0), triple(padding, 0), triple(dilation, 0), groups};
}

// Of a tensor with so many dims, the first two among them.
inline Extents map_sizes(int64_t images, int64_t channels, const Triple& size, int64_t dims) {
  Extents sizes{images, channels};
  if (dims > 4) sizes.push_back(size.level);
  if (dims > 3) sizes.push_back(size.row);
  sizes.push_back(size.column);
  return sizes;
}

}  // namespace wnfused::cpu

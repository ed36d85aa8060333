// A layer's map as the ops beside its product take it: which dim a bias goes along, how it lies, and its type.
#pragma once

#include "cuda/torch.h"
#include "layout.h"

namespace wnfused::gpu {

// Entries in memory from one channel to the next: the map is contiguous, or has dim 1 running fastest.
inline int64_t inner_of(const char* op, const Tensor& map, int64_t channel) {
  STD_TORCH_CHECK(channel >= 0 && channel < map.dim(), op, ": dim ", channel, " is out of range");
  int64_t inner = 1;
  if (map.is_contiguous()) {
    for (int64_t d = channel + 1; d < map.dim(); ++d) inner *= map.size(d);
  } else {
    STD_TORCH_CHECK(channel == 1 && has_dense_rows(map), op, ": the map must be dense");
  }
  return inner;
}

// Calls body with a value of the map's type.
template <class Body>
auto with_entry(const char* op, const Tensor& map, const Body& body) {
  switch (map.scalar_type()) {
    case ScalarType::Float:
      return body(float{});
    case ScalarType::BFloat16:
      return body(BFloat{});
    case ScalarType::Half:
      return body(Half{});
    default:
      STD_TORCH_CHECK(false, op, ": the map must be float32, bfloat16 or float16");
  }
}

}  // namespace wnfused::gpu

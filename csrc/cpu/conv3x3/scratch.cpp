// Memory that a worker needs for 3x3 convolutions.
#include <algorithm>

#include "cpu/conv3x3/geometry.h"

namespace wnfused::cpu {
namespace {

int64_t panels(const Geometry& geometry, int64_t rows, int64_t blocks) {
  return geometry.planes * (blocks * rows + 1) * kLanes;
}

int64_t conv_floats(const Geometry& geometry) {
  return geometry.level_taps * panels(geometry, geometry.conv_rows, geometry.depth_blocks) +
         panels(geometry, geometry.conv_rows, geometry.conv_bundle_blocks);
}

int64_t float_worker_floats(const Geometry& geometry) {
  const int64_t own = geometry.wgrad_finishes ? geometry.gradient_size() : 0;
  return std::max(conv_floats(geometry), geometry.own_gradient_at() + own);
}

}  // namespace

int64_t packing_offset(const Geometry& geometry) { return geometry.by_bundles ? conv_floats(geometry) : 0; }

int64_t worker_floats(const Geometry& geometry) {
  const int64_t pack = 2 * kLanes * kLanes * geometry.taps();
  const int64_t conv = geometry.is_pairs() ? std::max(geometry.conv_scratch(), geometry.wgrad_scratch())
                                           : float_worker_floats(geometry);
  return std::max({conv, packing_offset(geometry) + pack, geometry.finish_floats()});
}

int64_t zeros_floats(const Geometry& geometry) {
  return geometry.width * std::max(geometry.padded_channels, geometry.padded_outputs);
}

}  // namespace wnfused::cpu

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
  const int64_t wgrad =
      std::max<int64_t>(geometry.wgrad_kept_panels, 1) *
          panels(geometry, geometry.wgrad_rows, geometry.depth_blocks) +
      panels(geometry, geometry.wgrad_rows, geometry.wgrad_bundle_blocks) +
      (geometry.is_winograd() ? geometry.planes * geometry.sums_stride() : 0);
  return std::max(conv_floats(geometry), wgrad);
}

}  // namespace

int64_t packing_offset(const Geometry& geometry) { return geometry.by_bundles ? conv_floats(geometry) : 0; }

int64_t worker_floats(const Geometry& geometry) {
  const int64_t unit = kLanes * kLanes * geometry.taps(), row = geometry.padded_row_floats();
  const int64_t pack = 2 * unit, finish = unit + kFinishRows * row;
  const int64_t conv = geometry.is_pairs() ? std::max(geometry.conv_scratch(), geometry.wgrad_scratch())
                                           : float_worker_floats(geometry);
  return std::max({conv, packing_offset(geometry) + pack, finish});
}

int64_t zeros_floats(const Geometry& geometry) {
  return geometry.width * std::max(geometry.padded_channels, geometry.padded_outputs);
}

}  // namespace wnfused::cpu

#include "stage_scratch.h"

#include <algorithm>

#include "linear_layer.h"

namespace wnfused::cpu {
namespace {

int64_t pair_worker_floats(const Geometry& geometry) {
  const auto floats = [](int64_t elements) { return (elements + 2 * kLanes - 1) / (2 * kLanes) * kLanes; };
  const int64_t conv = floats(geometry.conv_panel()) + geometry.conv_group_blocks * geometry.conv_rows * kLanes;
  constexpr int64_t kSegmentFloats = 2 * sizeof(void*) / sizeof(float);
  const int64_t wgrad = geometry.wgrad_segments() * kSegmentFloats + kLanes + floats(geometry.wgrad_inputs()) +
                        floats(geometry.wgrad_gradients());
  return std::max(conv, wgrad);
}

int64_t panels(const Geometry& geometry, int64_t rows, int64_t blocks) {
  return geometry.planes * (blocks * rows + 1) * kLanes;
}

int64_t conv_floats(const Geometry& geometry) {
  return geometry.level_taps * panels(geometry, geometry.conv_rows, geometry.channel_blocks) +
         panels(geometry, geometry.conv_rows, geometry.conv_group_blocks);
}

int64_t float_worker_floats(const Geometry& geometry) {
  const int64_t wgrad =
      panels(geometry, geometry.wgrad_rows, geometry.channel_blocks) +
      panels(geometry, geometry.wgrad_rows, geometry.wgrad_group_blocks) +
      (geometry.is_winograd() ? geometry.planes * geometry.sums_stride() : 0);
  return std::max(conv_floats(geometry), wgrad);
}

}  // namespace

int64_t packing_offset(const Geometry& geometry) { return geometry.group_banks ? conv_floats(geometry) : 0; }

int64_t worker_floats(const Geometry& geometry) {
  const int64_t unit = kLanes * kLanes * geometry.taps(), row = geometry.padded_channels * geometry.taps();
  const int64_t pack = 2 * unit + row, finish = unit + 18 * row;
  const int64_t conv = geometry.is_pairs() ? pair_worker_floats(geometry) : float_worker_floats(geometry);
  return std::max({conv, packing_offset(geometry) + pack, finish});
}

int64_t zeros_floats(const Geometry& geometry) {
  return geometry.width * std::max(geometry.padded_channels, geometry.padded_outputs);
}

int64_t worker_floats(const Pieces& geometry) {
  const auto panels = [&](int64_t count, int64_t rows, int64_t blocks) {
    const int64_t sources = geometry.panel_rows(rows) * geometry.source.channel_blocks;
    return geometry.planes * (count * (sources + 1) + rows * blocks + 1) * kLanes;
  };
  const int64_t conv = panels(geometry.line_taps, geometry.conv_rows, geometry.conv_group_blocks);
  const int64_t wgrad = panels(1, geometry.wgrad_rows, geometry.wgrad_group_blocks) +
                        geometry.line_taps * geometry.line_planes() * geometry.sums_stride;
  const int64_t finish = 18 * divide_up(geometry.direct.planes * geometry.direct.depth, kLanes) * kLanes;
  return std::max({conv, wgrad, geometry.direct_floats(), finish});
}

int64_t zeros_floats(const Pieces& geometry) {
  return std::max(geometry.source.padded_channels, geometry.padded_outputs);
}

int64_t worker_floats(const Window& window) {
  const int64_t row = divide_up(window.planes * window.depth, kLanes) * kLanes, finish = 18 * row;
  // Of a panel: what is read, added and written, and a row that is not read.
  const int64_t outputs = window.conv_group_blocks * kLanes;
  const int64_t panel = window.conv_rows * (window.source.padded_channels + 2 * outputs) + outputs;
  const int64_t product =
      window.has_product_gradient() ? kDepthChunk * (kNarrowRows + window.wgrad_group_blocks * kLanes) : 0;
  return std::max({panel, finish, product});
}

int64_t zeros_floats(const Window& window) {
  return std::max(window.source.padded_channels, window.padded_outputs);
}

}  // namespace wnfused::cpu

#include "window.h"

#include <algorithm>

namespace wnfused::cpu {
namespace {

// Banks' planes start in different cache sets.
constexpr int64_t kPlanePadding = kLanes;

// From this many images on, a panel holds one pixel of all of them; larger maps have few pixels at the border.
constexpr int64_t kManyImages = 16, kSmallMap = 64;

// Indices i = 0, 1, .. with origin + i step < size.
int64_t count_steps(int64_t origin, int64_t step, int64_t size) {
  return origin < size ? divide_up(size - origin, step) : 0;
}

Window make_window(const ConvShape& shape, const MapShape& source, const MapShape& target, bool thin) {
  Window window{};
  window.source = source;
  window.target = target;
  window.thin = thin;
  window.pixel = thin ? source.channels : source.padded_channels;
  window.target_pixel = target.padded_channels;
  window.tap_columns = thin && shape.dilation.column == 1 ? shape.kernel.column : 1;
  window.output_blocks = target.channel_blocks;
  window.padded_outputs = target.padded_channels;
  window.groups = shape.groups;
  if (shape.is_depthwise()) {
    window.depth = window.bank_depth = window.group_blocks = 1;
    window.group_channels = kLanes;
  } else if (shape.groups > 1) {
    const int64_t outputs = target.channels / shape.groups, sharing = divide_up(kLanes, outputs);
    window.depth = window.bank_depth = window.group_channels = source.channels / shape.groups * sharing;
    window.group_blocks = outputs * sharing / kLanes;
  } else {
    window.depth = window.group_channels = source.channels * window.tap_columns;
    window.bank_depth = thin ? window.depth : source.padded_channels;
    window.group_blocks = window.output_blocks;
  }
  window.planes = shape.taps() / window.tap_columns;
  window.plane_stride = window.bank_depth * target.padded_channels + kPlanePadding;
  const bool small = target.height * target.width <= kSmallMap;
  window.by_position = !thin && window.planes > 1 && target.images >= kManyImages && small;
  return window;
}

void divide(Window& window, int64_t slice_units, int64_t workers) {
  Pair low{0, 0}, high{window.source.height - 1, window.source.width - 1};
  for (int64_t i = 0; i < window.grid_count; ++i) {
    const Grid& grid = window.grids[i];
    if (grid.rows == 0 || grid.columns == 0) continue;
    for (int64_t k = 0; k < grid.taps; ++k) {
      const Tap& tap = window.taps[grid.first_tap + k];
      low = {std::min(low.row, tap.row), std::min(low.column, tap.column)};
      high = {std::max(high.row, (grid.rows - 1) * window.source_step.row + tap.row),
              std::max(high.column, (grid.columns - 1) * window.source_step.column + tap.column + window.tap_columns - 1)};
    }
  }
  window.before = {-low.row, -low.column};
  window.after = {high.row - window.source.height + 1, high.column - window.source.width + 1};
  window.pitch = window.before.column + window.source.width + window.after.column;
  const Work work{window.output_blocks, window.bank_size(), window.source.map_size(), kMaxPanelRows, kMaxPanelRows,
                  workers};
  const auto chunks_before = [&](int64_t grids, int64_t rows) {
    int64_t chunks = 0;
    for (int64_t i = 0; i < grids; ++i) chunks += divide_up(window.units(window.grids[i]), rows);
    return chunks;
  };
  divide_convolution(work, [&](int64_t rows) { return chunks_before(window.grid_count, rows); }, window);
  for (int64_t i = 0; i < window.grid_count; ++i) window.grids[i].first_chunk = chunks_before(i, window.conv_rows);
  const int64_t units = window.units(window.grids[0]);
  if (window.has_product_gradient()) divide_product_gradient(work, units, window);
  else divide_gradient(work, units, slice_units, window);
}

}  // namespace

bool ConvShape::is_sound() const {
  // Far beyond any layer, and small enough for sums and products of two.
  constexpr int64_t kFar = int64_t{1} << 20;
  const auto sound = [&](int64_t Pair::*at) {
    const auto within = [](int64_t value, int64_t least, int64_t most) { return least <= value && value <= most; };
    return within(kernel.*at, 1, kMaxWindowTaps) && within(stride.*at, 1, kMaxGrids) && within(dilation.*at, 1, kFar) &&
           within(padding.*at, 0, kFar) && size.*at >= 1 &&
           size.*at + 2 * (padding.*at) > dilation.*at * (kernel.*at - 1);
  };
  return images >= 1 && inputs >= 1 && outputs >= 1 && groups >= 1 && inputs % groups == 0 && outputs % groups == 0 &&
         sound(&Pair::row) && sound(&Pair::column) && taps() <= kMaxWindowTaps && stride.product() <= kMaxGrids;
}

Pair ConvShape::output_size() const {
  const auto extent = [this](int64_t Pair::*at) {
    return (size.*at + 2 * (padding.*at) - dilation.*at * (kernel.*at - 1) - 1) / (stride.*at) + 1;
  };
  return {extent(&Pair::row), extent(&Pair::column)};
}

Window forward_window(const ConvShape& shape, bool thin, int64_t workers) {
  const Pair size = shape.output_size();
  Window window = make_window(shape, map_shape(shape.images, shape.inputs, shape.size.row, shape.size.column),
                              map_shape(shape.images, shape.outputs, size.row, size.column), thin);
  window.source_step = shape.stride;
  window.target_step = {1, 1};
  window.grid_count = 1;
  window.grids[0] = {{0, 0}, size.row, size.column, 0, window.planes, 0};
  int64_t plane = 0;
  for (int64_t i = 0; i < shape.kernel.row; ++i) {
    for (int64_t j = 0; j < shape.kernel.column; j += window.tap_columns, ++plane)
      window.taps[plane] = {plane, i * shape.dilation.row - shape.padding.row,
                            j * shape.dilation.column - shape.padding.column};
  }
  divide(window, 4 * window.bank_depth, workers);
  return window;
}

Window backward_window(const ConvShape& shape, int64_t workers) {
  const Pair size = shape.output_size();
  Window window = make_window(shape, map_shape(shape.images, shape.outputs, size.row, size.column),
                              map_shape(shape.images, shape.inputs, shape.size.row, shape.size.column), false);
  window.source_step = {1, 1};
  window.target_step = shape.stride;
  int64_t taps = 0;
  for (int64_t row = 0; row < shape.stride.row; ++row) {
    for (int64_t column = 0; column < shape.stride.column; ++column) {
      Grid& grid = window.grids[window.grid_count++];
      grid = {{row, column},
              count_steps(row, shape.stride.row, shape.size.row),
              count_steps(column, shape.stride.column, shape.size.column),
              taps,
              0,
              0};
      for (int64_t i = 0; i < shape.kernel.row; ++i) {
        for (int64_t j = 0; j < shape.kernel.column; ++j) {
          const Pair moved{row + shape.padding.row - i * shape.dilation.row,
                           column + shape.padding.column - j * shape.dilation.column};
          if (moved.row % shape.stride.row || moved.column % shape.stride.column) continue;
          window.taps[taps++] = {i * shape.kernel.column + j, moved.row / shape.stride.row,
                                 moved.column / shape.stride.column};
        }
      }
      grid.taps = taps - grid.first_tap;
    }
  }
  divide(window, 4 * window.target.padded_channels, workers);
  return window;
}

}  // namespace wnfused::cpu

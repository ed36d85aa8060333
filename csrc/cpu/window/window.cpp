#include "cpu/window/window.h"

#include <algorithm>

#include "cpu/products/wide.h"

namespace wnfused::cpu {
namespace {

// Banks' planes start in different cache sets.
constexpr int64_t kPlanePadding = kLanes;

// From this many images on, a panel holds one pixel of all of them; larger maps have few pixels at the border.
constexpr int64_t kManyImages = 16, kSmallMap = 64;
// So it does of two images and more, and of larger maps, where a quarter of what taps meet is padding: wide kernels on
// small maps, and dilated ones.
constexpr int64_t kSomeImages = 2, kMiddleMap = 2400;

// Indices i = 0, 1, .. with origin + i step < size.
int64_t count_steps(int64_t origin, int64_t step, int64_t size) {
  return origin < size ? divide_up(size - origin, step) : 0;
}

// From maps of `source` pixels to maps of `target` pixels.
Window make_window(const ConvShape& shape, int64_t inputs, const Triple& from, int64_t outputs, const Triple& to,
                   bool thin) {
  Window window{};
  const MapShape source = window.source = map_of_size(shape.images, inputs, from);
  const MapShape target = window.target = map_of_size(shape.images, outputs, to);
  window.source_size = from;
  window.target_size = to;
  window.thin = thin;
  window.pixel = thin ? source.channels : source.padded_channels;
  window.target_pixel = target.padded_channels;
  window.tap_columns = thin && shape.dilation.column == 1 ? shape.kernel.column : 1;
  window.output_blocks = target.channel_blocks;
  window.padded_outputs = target.padded_channels;
  window.groups = shape.groups;
  window.sharing = 1;
  if (shape.is_depthwise()) {
    window.depth = window.bank_depth = window.group_blocks = 1;
    window.group_channels = kLanes;
  } else if (shape.groups > 1) {
    const int64_t outputs = target.channels / shape.groups;
    window.sharing = groups_in_blocks(outputs);
    window.depth = window.bank_depth = window.group_channels = source.channels / shape.groups * window.sharing;
    window.group_blocks = outputs * window.sharing / kLanes;
  } else {
    window.depth = window.group_channels = source.channels * window.tap_columns;
    window.bank_depth = thin ? window.depth : source.padded_channels;
    window.group_blocks = window.output_blocks;
  }
  window.planes = shape.taps() / window.tap_columns;
  window.plane_stride = window.bank_depth * target.padded_channels + kPlanePadding;
  window.by_position = !thin && window.planes > 1 && goes_by_position(shape, to);
  return window;
}

void divide(Window& window, int64_t slice_units, int64_t workers) {
  const Triple& size = window.source_size;
  Triple low{0, 0, 0}, high{size.level - 1, size.row - 1, size.column - 1};
  const auto widen = [&](int64_t Triple::*at, const Grid& grid, int64_t tap, int64_t columns) {
    low.*at = std::min(low.*at, tap);
    high.*at = std::max(high.*at, (grid.size.*at - 1) * window.source_step.*at + tap + columns - 1);
  };
  for (int64_t i = 0; i < window.grid_count; ++i) {
    const Grid& grid = window.grids[i];
    if (grid.size.product() == 0) continue;
    for (int64_t k = 0; k < grid.taps; ++k) {
      const Tap& tap = window.taps[grid.first_tap + k];
      widen(&Triple::level, grid, tap.level, 1);
      widen(&Triple::row, grid, tap.row, 1);
      widen(&Triple::column, grid, tap.column, window.tap_columns);
    }
  }
  const Triple before{-low.level, -low.row, -low.column};
  const Triple after{high.level - size.level + 1, high.row - size.row + 1, high.column - size.column + 1};
  window.leaves_map = !(before == Triple{0, 0, 0} && after == Triple{0, 0, 0});
  if (window.thin) window.before = before, window.after = after;
  window.lines = window.before.row + size.row + window.after.row;
  window.pitch = window.before.column + size.column + window.after.column;
  constexpr int64_t kStay = 2;
  const Work work{window.output_blocks, window.bank_size(), window.source.map_size(), window.gradient_size(),
                  kMaxPanelRows,        kMaxPanelRows,      workers,                    kStay};
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

// Puts the taps that a pixel of x at `origin` meets, as does every pixel a stride further, after the first `count`.
// Returns how many there are then.
int64_t add_taps(const ConvShape& shape, const Triple& origin, int64_t count, Window& window) {
  const auto moved = [&](int64_t Triple::*at, int64_t k) {
    return origin.*at + shape.padding.*at - k * (shape.dilation.*at);
  };
  for (int64_t d = 0; d < shape.kernel.level; ++d) {
    const int64_t level = moved(&Triple::level, d);
    if (level % shape.stride.level) continue;
    for (int64_t i = 0; i < shape.kernel.row; ++i) {
      const int64_t row = moved(&Triple::row, i);
      if (row % shape.stride.row) continue;
      for (int64_t j = 0; j < shape.kernel.column; ++j) {
        const int64_t column = moved(&Triple::column, j), plane = (d * shape.kernel.row + i) * shape.kernel.column + j;
        if (column % shape.stride.column) continue;
        window.taps[count++] = {plane, level / shape.stride.level, row / shape.stride.row,
                                column / shape.stride.column};
      }
    }
  }
  return count;
}

}  // namespace

bool ConvShape::is_sound() const {
  // Far beyond any layer, and small enough for sums and products of two.
  constexpr int64_t kFar = int64_t{1} << 20;
  const auto sound = [&](int64_t Triple::*at) {
    const auto within = [](int64_t value, int64_t least, int64_t most) { return least <= value && value <= most; };
    return within(kernel.*at, 1, kFar) && within(stride.*at, 1, kFar) && within(dilation.*at, 1, kFar) &&
           within(padding.*at, 0, kFar) && size.*at >= 1 &&
           size.*at + 2 * (padding.*at) > dilation.*at * (kernel.*at - 1);
  };
  return images >= 1 && inputs >= 1 && outputs >= 1 && groups >= 1 && inputs % groups == 0 && outputs % groups == 0 &&
         sound(&Triple::level) && sound(&Triple::row) && sound(&Triple::column);
}

bool ConvShape::has_windows_apart() const {
  const auto along = [this](int64_t Triple::*at) { return stride.*at > (kernel.*at - 1) * (dilation.*at); };
  return along(&Triple::level) && along(&Triple::row) && along(&Triple::column);
}

bool ConvShape::fits_window() const { return taps() <= kMaxWindowTaps && stride.product() <= kMaxGrids; }

Triple ConvShape::output_size() const {
  const auto extent = [this](int64_t Triple::*at) {
    return (size.*at + 2 * (padding.*at) - dilation.*at * (kernel.*at - 1) - 1) / (stride.*at) + 1;
  };
  return {extent(&Triple::level), extent(&Triple::row), extent(&Triple::column)};
}

int64_t ConvShape::met_taps() const {
  const Triple outputs = output_size();
  const auto along = [&](int64_t Triple::*at) {
    int64_t count = 0;
    for (int64_t k = 0; k < kernel.*at; ++k) {
      const int64_t first = k * (dilation.*at) - padding.*at, step = stride.*at;
      const int64_t before = first < 0 ? divide_up(-first, step) : 0;  // outputs whose tap lies before the map
      count += std::max<int64_t>(0, std::min(count_steps(first, step, size.*at), outputs.*at) - before);
    }
    return count;
  };
  return along(&Triple::level) * along(&Triple::row) * along(&Triple::column);
}

bool goes_by_position(const ConvShape& shape, const Triple& target) {
  if (shape.images >= kManyImages && target.product() <= kSmallMap) return true;
  if (shape.images < kSomeImages || target.product() > kMiddleMap) return false;
  return 4 * shape.met_taps() <= 3 * shape.output_size().product() * shape.taps();
}

MapShape map_of_size(int64_t images, int64_t channels, const Triple& size) {
  return map_shape(images, channels, size.level * size.row, size.column);
}

Window forward_window(const ConvShape& shape, bool thin, int64_t workers) {
  const Triple size = shape.output_size();
  Window window = make_window(shape, shape.inputs, shape.size, shape.outputs, size, thin);
  window.source_step = shape.stride;
  window.target_step = {1, 1, 1};
  window.grid_count = 1;
  window.grids[0] = {{0, 0, 0}, size, 0, window.planes, 0};
  int64_t plane = 0;
  for (int64_t d = 0; d < shape.kernel.level; ++d) {
    for (int64_t i = 0; i < shape.kernel.row; ++i) {
      for (int64_t j = 0; j < shape.kernel.column; j += window.tap_columns, ++plane)
        window.taps[plane] = {plane, d * shape.dilation.level - shape.padding.level,
                              i * shape.dilation.row - shape.padding.row,
                              j * shape.dilation.column - shape.padding.column};
    }
  }
  divide(window, 4 * window.bank_depth, workers);
  return window;
}

Window backward_window(const ConvShape& shape, int64_t workers) {
  Window window = make_window(shape, shape.outputs, shape.output_size(), shape.inputs, shape.size, false);
  window.source_step = {1, 1, 1};
  window.target_step = shape.stride;
  const auto steps = [&](int64_t Triple::*at, int64_t origin) {
    return count_steps(origin, shape.stride.*at, shape.size.*at);
  };
  int64_t taps = 0;
  for (int64_t d = 0; d < shape.stride.level; ++d) {
    for (int64_t i = 0; i < shape.stride.row; ++i) {
      for (int64_t j = 0; j < shape.stride.column; ++j) {
        Grid& grid = window.grids[window.grid_count++];
        grid.origin = {d, i, j};
        grid.size = {steps(&Triple::level, d), steps(&Triple::row, i), steps(&Triple::column, j)};
        grid.first_tap = taps;
        taps = add_taps(shape, grid.origin, taps, window);
        grid.taps = taps - grid.first_tap;
      }
    }
  }
  divide(window, 4 * window.target.padded_channels, workers);
  return window;
}

int64_t worker_floats(const Window& window) {
  const int64_t row = divide_up(window.planes * window.depth, kLanes) * kLanes, finish = kFinishRows * row;
  // Of a panel: what is read, added and written, and a row that is not read.
  const int64_t outputs = window.conv_bundle_blocks * kLanes;
  const int64_t panel = window.conv_rows * (window.source.padded_channels + 2 * outputs) + outputs;
  const int64_t product =
      window.has_product_gradient() ? kDepthChunk * (kNarrowRows + window.wgrad_bundle_blocks * kLanes) : 0;
  return std::max({panel, finish, product});
}

int64_t zeros_floats(const Window& window) {
  return std::max(window.source.padded_channels, window.padded_outputs);
}

}  // namespace wnfused::cpu

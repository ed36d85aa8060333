#include "cpu/ops/unfolding.h"

#include <atomic>

#include "cpu/layer/gains.h"
#include "cpu/linear/linear_layer.h"
#include "cpu/machine/parallel.h"
#include "cpu/ops/conv_extents.h"

namespace wnfused::cpu {
namespace {

// Along one dim: the taps [first, last) of a pixel's window that meet the map, and at which entry of it tap 0 would be.
struct TapRange {
  int64_t place, first, last;
};

std::vector<TapRange> spans_of(const ConvShape& shape, int64_t Triple::*at, int64_t step) {
  const int64_t taps = shape.kernel.*at, dilation = shape.dilation.*at, count = shape.output_size().*at;
  std::vector<TapRange> spans(count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t start = i * (shape.stride.*at) - shape.padding.*at;
    const int64_t first = divide_up(std::max<int64_t>(-start, 0), dilation);
    const int64_t last = divide_up(std::max<int64_t>(shape.size.*at - start, 0), dilation);
    spans[i] = {start * step, std::min(first, taps), std::min(last, taps)};
  }
  return spans;
}

// The windows of a layer over a map.
struct Windows {
  struct One {
    int64_t place;
    Triple first, last;
  };

  Triple kernel, step;  // step: from one tap to the next, in entries of the map
  std::vector<One> each;
};

Windows windows_of(const ConvShape& shape, const Tensor& map) {
  const Triple strides = triple_of(map.strides(), 2, 0), &dilation = shape.dilation;
  const auto levels = spans_of(shape, &Triple::level, strides.level), rows = spans_of(shape, &Triple::row, strides.row);
  const auto columns = spans_of(shape, &Triple::column, strides.column);
  Windows windows{shape.kernel,
                  {dilation.level * strides.level, dilation.row * strides.row, dilation.column * strides.column},
                  {}};
  windows.each.reserve(shape.images * levels.size() * rows.size() * columns.size());
  for (int64_t image = 0; image < shape.images; ++image)
    for (const TapRange& level : levels)
      for (const TapRange& row : rows)
        for (const TapRange& column : columns)
          windows.each.push_back({image * map.stride(0) + level.place + row.place + column.place,
                                  {level.first, row.first, column.first},
                                  {level.last, row.last, column.last}});
  return windows;
}

// use(tap, entry of the map) for the taps of window `index` that meet the map.
template <class Use>
void for_taps(const Windows& windows, int64_t index, const Use& use) {
  const Windows::One& window = windows.each[index];
  const Triple &kernel = windows.kernel, &step = windows.step, &first = window.first, &last = window.last;
  for (int64_t i = first.level; i < last.level; ++i)
    for (int64_t j = first.row; j < last.row; ++j)
      for (int64_t k = first.column; k < last.column; ++k)
        use((i * kernel.row + j) * kernel.column + k,
            window.place + i * step.level + j * step.row + k * step.column);
}

constexpr int64_t kBlock = 16;  // channels that are met together: in NCHW their lines serve several windows

// Rows `rows` of a layer's windows, and the map.
struct Unfolding {
  const ConvShape& shape;
  Windows windows;
  float *rows, *map;
  Order order;
  int64_t channel_step, length, count;

  Unfolding(const ConvShape& shape, const Tensor& map, const Tensor& rows, const Order& order)
      : shape(shape), windows(windows_of(shape, map)), rows(data_of(rows)), map(data_of(map)), order(order),
        channel_step(map.stride(1)), length(shape.inputs * shape.taps()),
        count(shape.output_pixels()) {}

  int64_t blocks() const { return divide_up(shape.inputs, kBlock); }

  // use(entry of a row, entry of the map) for all of some windows and blocks of channels that meet it.
  template <class Use>
  void for_entries(int64_t first_window, int64_t last_window, int64_t first_block, int64_t last_block,
                   const Use& use) const {
    for (int64_t first = first_block * kBlock; first < std::min(last_block * kBlock, shape.inputs); first += kBlock) {
      const int64_t channels = std::min(kBlock, shape.inputs - first);
      for (int64_t window = first_window; window < last_window; ++window) {
        float* row = rows + window * length + first * order.channel;
        for_taps(windows, window, [&](int64_t tap, int64_t place) {
          float *entries = row + tap * order.tap, *pixels = map + place + first * channel_step;
          for (int64_t c = 0; c < channels; ++c) use(entries[c * order.channel], pixels[c * channel_step]);
        });
      }
    }
  }

 private:
  static float* data_of(const Tensor& t) { return static_cast<float*>(const_cast<void*>(t.const_data_ptr())); }
};

}  // namespace

bool is_rows(const Tensor& map) {
  const int64_t channels = map.size(1);
  const auto lies = [&](int64_t d, int64_t distance) { return map.size(d) == 1 || map.stride(d) == distance; };
  int64_t entries = channels;
  for (int64_t d = map.dim() - 1; d > 1; entries *= map.size(d--))
    if (!lies(d, entries)) return false;
  return lies(1, 1) && lies(0, entries);
}

ConvShape pointwise(const Tensor& map) {
  constexpr Triple kOne{1, 1, 1};
  return {map.size(0), map.size(1), map.size(1), triple_of(map.sizes(), 2, 1), kOne, kOne, {0, 0, 0}, kOne, 1};
}

Tensor empty_matrix(int64_t rows, int64_t columns) {
  const int64_t sizes[] = {rows, columns};
  return recycled_empty({sizes, 2}, ScalarType::Float);
}

Tensor unfolded(const Tensor& map, const ConvShape& shape, const Order& order) {
  const int64_t count = shape.output_pixels(), length = shape.inputs * shape.taps();
  if (shape.is_pointwise() && is_rows(map)) return matrix_of(map, count, length);
  const Tensor rows = empty_matrix(count, length);
  const Unfolding job(shape, map, rows, order);
  for_rows(0, count, length, [&](int64_t begin, int64_t end) {
    if (!(shape.padding == Triple{0, 0, 0})) std::fill(job.rows + begin * length, job.rows + end * length, 0.0f);
    job.for_entries(begin, end, 0, job.blocks(), [](float& entry, float& pixel) { entry = pixel; });
  });
  return rows;
}

Tensor rows_of(const Tensor& map) { return unfolded(map, pointwise(map), kPixels); }

Tensor rows_to_fold(const Tensor& map, const ConvShape& shape) {
  const int64_t count = shape.output_pixels(), length = shape.inputs * shape.taps();
  return shape.is_pointwise() && is_rows(map) ? matrix_of(map, count, length) : empty_matrix(count, length);
}

void fold(const Tensor& rows, const ConvShape& shape, const Order& order, const Tensor& map) {
  if (rows.const_data_ptr() == map.const_data_ptr()) return;
  const Unfolding job(shape, map, rows, order);
  if (!shape.is_pointwise()) {
    Tensor target = map;
    torch::stable::zero_(target);
  }
  // By channels, which share no line of a map in NCHW; by windows where there are none to divide.
  const auto set = [](float& entry, float& pixel) { pixel = entry; };
  const auto add = [](float& entry, float& pixel) { pixel += entry; };
  if (job.blocks() == 1 && shape.has_windows_apart()) {
    for_rows(0, job.count, job.length,
             [&](int64_t begin, int64_t end) { job.for_entries(begin, end, 0, job.blocks(), set); });
  } else {
    for_rows(0, job.blocks(), kBlock * shape.taps() * job.count, [&](int64_t begin, int64_t end) {
      if (shape.has_windows_apart()) job.for_entries(0, job.count, begin, end, set);
      else job.for_entries(0, job.count, begin, end, add);
    });
  }
}

bool all_finite(const Tensor& t) {
  constexpr uint32_t kExponent = 0x7f800000;
  const auto* bits = static_cast<const char*>(t.const_data_ptr());
  std::atomic<bool> finite{true};
  for_rows(0, t.numel(), 1, [&](int64_t begin, int64_t end) {
    uint32_t found = 0;
    for (int64_t i = begin; i < end; ++i) {
      uint32_t value;
      __builtin_memcpy(&value, bits + i * sizeof value, sizeof value);
      found |= (value & kExponent) == kExponent;
    }
    if (found) finite = false;
  });
  return finite;
}

bool all_finite(const float* gain, const float* norms, int64_t rows) {
  const std::vector<float> scale = scales_of(gain, norms, rows);
  const auto finite = [](float value) { return std::isfinite(value); };
  return std::all_of(scale.begin(), scale.end(), finite) && (!gain || std::all_of(norms, norms + rows, finite));
}

}  // namespace wnfused::cpu

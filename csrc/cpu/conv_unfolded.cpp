// A convolution layer as a linear one (linear_routes.h): wide layers on few pixels, whose time is that of their weights,
// which the kernels of linear layers read as they lie.
//
//   forward    X = the windows of x      y = act(s (X v^T) + b + residual)
//   backward   X once more               dX, dv, dg, db as of that layer; dx = the sum of dX where windows overlap
//
// A row of X [images x pixels, channels x taps] is what one pixel of the output meets, zeros beyond the map, in the order
// of a row of v. A 1x1 convolution of a channels_last map has X = x.
#include <torch/csrc/stable/library.h>

#include "conv_routes.h"
#include "linear_routes.h"

namespace wnfused::cpu {
namespace {

// Along one dim: of a pixel's window the taps [first, last) that meet the map, and where tap 0 would, in entries of it.
struct Span {
  int64_t place, first, last;
};

std::vector<Span> spans_of(const ConvShape& shape, int64_t Triple::*at, int64_t step) {
  const int64_t taps = shape.kernel.*at, dilation = shape.dilation.*at, count = shape.output_size().*at;
  std::vector<Span> spans(count);
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
    for (const Span& level : levels)
      for (const Span& row : rows)
        for (const Span& column : columns)
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

// A 1x1 layer over a map of `channels` channels, whose windows are the map's pixels.
ConvShape pointwise(const Tensor& map) {
  constexpr Triple kOne{1, 1, 1};
  return {map.size(0), map.size(1), map.size(1), triple_of(map.sizes(), 2, 1), kOne, kOne, {0, 0, 0}, kOne, 1};
}

int64_t pixels_of(const ConvShape& shape) { return shape.images * shape.output_size().product(); }

bool is_pointwise(const ConvShape& shape) {
  return shape.taps() == 1 && shape.stride.product() == 1 && shape.padding == Triple{0, 0, 0};
}

// Whether no pixel is in two windows.
bool are_apart(const ConvShape& shape) {
  const auto along = [&](int64_t Triple::*at) {
    return shape.stride.*at > (shape.kernel.*at - 1) * (shape.dilation.*at);
  };
  return along(&Triple::level) && along(&Triple::row) && along(&Triple::column);
}

// Whether the memory of a map is that of its pixels, one row of channels after the other.
bool is_rows(const Tensor& map) {
  const int64_t channels = map.size(1);
  const auto lies = [&](int64_t d, int64_t distance) { return map.size(d) == 1 || map.stride(d) == distance; };
  int64_t entries = channels;
  for (int64_t d = map.dim() - 1; d > 1; entries *= map.size(d--))
    if (!lies(d, entries)) return false;
  return lies(1, 1) && lies(0, entries);
}

// From one entry of a row to the next channel's, and to the next tap's.
struct Order {
  int64_t channel, tap;
};

Order order_of(const Tensor& v, int64_t taps) {
  return v.is_contiguous() ? Order{taps, 1} : Order{1, v.size(1)};
}

constexpr Order kPixels{1, 1};  // of rows with one tap

// Whether this way is the fastest (bench/NOTES.md has the measurements). What it saves is reading and packing the weights
// anew and, from 32 MB on, fresh memory for them; what it costs is to multiply by the padding and, forward, to put rows in
// the place of a map in NCHW.
constexpr int64_t kFewest = 8, kFew = 16, kMost = 256;  // pixels

// An image cut into patches, of more taps than the kernels of this library have.
bool is_patches(const ConvShape& shape) { return shape.taps() > kMaxWindowTaps && are_apart(shape); }

// What of the tensors' layout the choice depends on.
struct Layout {
  bool planes;  // the output is to be in NCHW, over two dims, which the vendor has kernels for
  bool rows;    // x is its windows
};

Layout layout_of(const ConvShape& shape, const ConvCall& conv) {
  return {conv.v.dim() == 4 && !gives_channels_last(conv), is_pointwise(shape) && is_rows(conv.x)};
}

bool suits_forward(const ConvShape& shape, const Layout& layout) {
  constexpr int64_t kWeightsAPixel = 4096, kPatches = 64, kHeavy = int64_t{1} << 23;
  const int64_t pixels = pixels_of(shape), weights = shape.inputs * shape.outputs;
  if (pixels <= kFewest || (is_patches(shape) && pixels <= kPatches)) return true;
  return pixels <= kMost && weights >= kWeightsAPixel * pixels &&
         (pixels <= kFew || !layout.planes || weights * shape.taps() >= kHeavy);
}

bool suits_backward(const ConvShape& shape, const Layout& layout, bool input) {
  constexpr int64_t kNarrow = 4096, kWeightsAPixel = 2048, kBesideVendor = 1024, kInPlace = 300, kPatches = 64;
  const int64_t pixels = pixels_of(shape), weights = shape.inputs * shape.outputs;
  if (pixels <= kFewest || (pixels <= kFew && weights >= kNarrow)) return true;
  if (is_patches(shape)) return input || pixels <= kPatches;
  if (layout.rows) return weights >= kInPlace * pixels;
  if (pixels > kMost) return false;
  return weights >= kWeightsAPixel * pixels ||
         (weights >= kBesideVendor * pixels && !conv_layer_method(shape, false));
}

// A layer of one group, and kernels for so many rows.
bool is_open(const ConvShape& shape) {
  const bool sound = shape.is_sound() && shape.groups == 1 && shape.outputs > 1;
  return sound && linear_kernels(false, pixels_of(shape));
}

// The layer, if it is float32, weight-normalised, and open.
std::optional<ConvShape> open_shape(const ConvCall& conv) {
  const std::optional<ConvShape> shape = conv_shape(conv.x, conv.v, conv.at);
  return shape && conv.gain && is_open(*shape) ? shape : std::nullopt;
}

// For tests: whether a layer without groups goes this way, forward and backward with the input's gradient. layout: see
// Layout; triples are of levels, rows and columns.
std::tuple<bool, bool> cpu_conv_unfolds(const std::vector<int64_t>& maps, const std::vector<int64_t>& kernel,
                                        const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                                        const std::vector<int64_t>& dilation, bool planes, bool rows) {
  const ConvShape shape{maps.at(0),
                        maps.at(1),
                        maps.at(2),
                        triple_of(maps, 3, 1),
                        triple_of(kernel, 0, 1),
                        triple_of(stride, 0, 1),
                        triple_of(padding, 0, 0),
                        triple_of(dilation, 0, 1),
                        1};
  const Layout layout{planes, rows};
  if (!is_open(shape)) return {false, false};
  return {suits_forward(shape, layout), suits_backward(shape, layout, true)};
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
        count(pixels_of(shape)) {}

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

Tensor matrix_of(const Tensor& memory, int64_t rows, int64_t columns) {
  return matrix(memory, 0, rows, columns, columns, 1);
}

Tensor empty_matrix(int64_t rows, int64_t columns) {
  const int64_t sizes[] = {rows, columns};
  if (rows * columns < kRecycled) return empty({rows, columns}, ScalarType::Float);
  return recycled_empty({sizes, 2}, ScalarType::Float);
}

// The windows of a map as rows, in place where they are that.
Tensor unfolded(const Tensor& map, const ConvShape& shape, const Order& order) {
  const int64_t count = pixels_of(shape), length = shape.inputs * shape.taps();
  if (is_pointwise(shape) && is_rows(map)) return matrix_of(map, count, length);
  const Tensor rows = empty_matrix(count, length);
  const Unfolding job(shape, map, rows, order);
  for_rows(0, count, length, [&](int64_t begin, int64_t end) {
    if (!(shape.padding == Triple{0, 0, 0})) std::fill(job.rows + begin * length, job.rows + end * length, 0.0f);
    job.for_entries(begin, end, 0, job.blocks(), [](float& entry, float& pixel) { entry = pixel; });
  });
  return rows;
}

Tensor rows_of(const Tensor& map) { return unfolded(map, pointwise(map), kPixels); }

// A matrix to be filled with rows for the map, which fold() puts there: the map's own memory, if it can be that.
Tensor rows_for(const Tensor& map, const ConvShape& shape) {
  const int64_t count = pixels_of(shape), length = shape.inputs * shape.taps();
  return is_pointwise(shape) && is_rows(map) ? matrix_of(map, count, length) : empty_matrix(count, length);
}

// The sums of rows where windows overlap.
void fold(const Tensor& rows, const ConvShape& shape, const Order& order, const Tensor& map) {
  if (rows.const_data_ptr() == map.const_data_ptr()) return;
  const Unfolding job(shape, map, rows, order);
  if (!is_pointwise(shape)) {
    Tensor target = map;
    torch::stable::zero_(target);
  }
  // By channels, which share no line of a map in NCHW; by windows where there are none to divide.
  const auto set = [](float& entry, float& pixel) { pixel = entry; };
  const auto add = [](float& entry, float& pixel) { pixel += entry; };
  if (job.blocks() == 1 && are_apart(shape)) {
    for_rows(0, job.count, job.length,
             [&](int64_t begin, int64_t end) { job.for_entries(begin, end, 0, job.blocks(), set); });
  } else {
    for_rows(0, job.blocks(), kBlock * shape.taps() * job.count, [&](int64_t begin, int64_t end) {
      if (are_apart(shape)) job.for_entries(0, job.count, begin, end, set);
      else job.for_entries(0, job.count, begin, end, add);
    });
  }
}

bool all_finite(const Tensor& rows) {
  const float* values = entries<float>(rows);
  float poison = 0.0f;
  for (int64_t i = 0, count = rows.numel(); i < count; ++i) poison += values[i] * 0.0f;
  return poison == 0.0f;
}

}  // namespace

std::optional<Tensor> unfolded_conv(const ConvCall& conv, const std::optional<Tensor>& residual, float* norms) {
  const std::optional<ConvShape> shape = open_shape(conv);
  if (!shape || !suits_forward(*shape, layout_of(*shape, conv))) return std::nullopt;
  const Tensor &x = conv.x, &v = conv.v;
  const Tensor y = empty_map(map_sizes(shape->images, shape->outputs, shape->output_size(), v.dim()),
                             gives_channels_last(conv));
  check_residual(residual, y);
  const ConvShape pixels = pointwise(y);
  const Tensor rows = unfolded(x, *shape, order_of(v, shape->taps()));
  const LinearShape linear{rows.size(0), rows.size(1), shape->outputs};
  const LinearCall call{linear, rows, matrix_of(v, linear.features, linear.inner), conv.gain, conv.bias,
                        residual ? std::optional(rows_of(*residual)) : std::nullopt, conv.activation, conv.slope,
                        rows_for(y, pixels), norms};
  run_linear(call);
  // A tap that meets no pixel takes no part in the vendor's sums; in these it is multiplied by 0.
  if (!all_finite(call.y)) return std::nullopt;
  fold(call.y, pixels, kPixels, y);
  return y;
}

std::optional<LayerGradients> unfolded_conv_backward(const ConvCall& conv, const Tensor& dy, const Tensor& y,
                                                     const float* norms, const ConvNeeds& needs, float* dgain) {
  const std::optional<ConvShape> shape = needs.x || needs.v ? open_shape(conv) : std::nullopt;
  if (!shape || !suits_backward(*shape, layout_of(*shape, conv), needs.x)) return std::nullopt;
  const Tensor &x = conv.x, &v = conv.v;
  const bool masked = conv.activation != Activation::kNone;
  const Tensor gradients = rows_of(dy);
  const std::vector<float> scale = scales_of(conv.gain, norms, shape->outputs);
  const auto finite = [](float value) { return std::isfinite(value); };
  if (!all_finite(gradients) || !std::all_of(scale.begin(), scale.end(), finite)) return std::nullopt;
  const Order order = order_of(v, shape->taps());
  const Tensor rows = unfolded(x, *shape, order);
  const LinearShape linear{rows.size(0), rows.size(1), shape->outputs};
  LinearGradient call{linear, rows, matrix_of(v, linear.features, linear.inner), conv.gain, norms,
                      std::nullopt, std::nullopt, dgain};
  LayerGradients made;
  float* dbias = nullptr;
  if (needs.x) {
    made.dx = empty_map(sizes_of(x), gives_channels_last(conv));
    call.dx = rows_for(*made.dx, *shape);
  }
  if (needs.v) {
    call.dv = empty_matrix(linear.features, linear.inner);
    made.dv = viewed_as(*call.dv, v);
  }
  if (needs.bias) {
    made.dbias = empty({shape->outputs}, ScalarType::Float);
    dbias = static_cast<float*>(made.dbias->mutable_data_ptr());
  }
  const std::optional<Tensor> dz = run_linear_backward(call, gradients, masked ? rows_of(y) : gradients,
                                                       conv.activation, conv.slope, needs.residual, dbias);
  if (needs.x) fold(*call.dx, *shape, order, *made.dx);
  if (dz) {
    made.dz = empty_map(sizes_of(y), is_channels_last(y));
    fold(*dz, pointwise(*made.dz), kPixels, *made.dz);
  }
  return made;
}

}  // namespace wnfused::cpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CompositeExplicitAutograd, m) {
  m.impl("cpu_conv_unfolds", TORCH_BOX(&wnfused::cpu::cpu_conv_unfolds));
}

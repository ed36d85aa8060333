// The items of depthwise layers (depthwise.h): all that is done with one tile of the map.
#pragma once

#include "cpu/conv/layer_job.h"
#include "cpu/depthwise/tiles.h"

namespace wnfused::cpu::WNFUSED_ISA {

// What the taps of some blocks of a tile read of a map: the pixels of `held`, of the first block; the next block's are
// `next` floats on. Held are all that a tap can meet, with zeros beyond the map, or those of the map alone.
struct TileSource {
  Region held;
  Pixels pixels;
  int64_t next;
};

// The rows of each grid in a region of the target, and the taps that they meet in a source: alike for every block.
class TileRows {
 public:
  TileRows(const Depthwise& layer, const TileSource& source, const Region& region, int64_t plane_stride)
      : layer_(layer),
        held_(source.held),
        region_(region),
        row_step_(source.pixels.row_step),
        step_(source.pixels.step) {
    const Triple step = layer.target_step;
    for (int64_t g = 0; g < layer.grid_count; ++g) {
      const Grid& grid = layer.grids[g];
      GridRows& rows = rows_[g];
      rows.rows = {steps_to(region.rows.begin - grid.origin.row, step.row),
                   steps_to(region.rows.end - grid.origin.row, step.row)};
      rows.columns = {steps_to(region.columns.begin - grid.origin.column, step.column),
                      steps_to(region.columns.end - grid.origin.column, step.column)};
      int64_t first = kMaxColumn, last = -kMaxColumn;
      for (int64_t k = grid.first_tap; k < grid.first_tap + grid.taps; ++k) {
        const Tap& tap = layer.taps[k];
        terms_[k] = {tap.plane * plane_stride, tap.row * row_step_ + tap.column * step_};
        first = smaller(first, tap.column);
        last = greater(last, tap.column);
      }
      const int64_t begin = steps_to(held_.columns.begin - first, layer.source_step.column);
      const int64_t end = steps_to(held_.columns.end - last, layer.source_step.column);
      rows.inner.begin = smaller(greater(begin, rows.columns.begin), rows.columns.end);
      rows.inner.end = smaller(greater(end, rows.inner.begin), rows.columns.end);
    }
  }

  // Calls use(products, row, column, pixels) for every run of pixels that meet the same taps: where it begins in the
  // region, and how many pixels it has.
  template <class Use>
  WNFUSED_INLINE void for_each(const float* source, const float* bank, const Use& use) const {
    const Triple step = layer_.target_step;
    for (int64_t g = 0; g < layer_.grid_count; ++g) {
      const Grid& grid = layer_.grids[g];
      const GridRows& rows = rows_[g];
      if (rows.columns.count() <= 0) continue;
      RowProducts products{nullptr, 0, nullptr, bank, layer_.source_step.column * step_};
      for (int64_t i = rows.rows.begin; i < rows.rows.end; ++i) {
        const int64_t line = i * layer_.source_step.row;
        // The taps are in the order of their rows, so those that meet rows of the map are neighbours.
        const Tap *first = layer_.taps + grid.first_tap, *last = first + grid.taps;
        const auto meets = [&](const Tap& tap) {
          return held_.rows.begin <= line + tap.row && line + tap.row < held_.rows.end;
        };
        while (first < last && !meets(*first)) ++first;
        while (first < last && !meets(last[-1])) --last;
        const float* start = source + (line - held_.rows.begin) * row_step_ - held_.columns.begin * step_;
        const int64_t row = i * step.row + grid.origin.row - region_.rows.begin;
        const int64_t column = grid.origin.column - region_.columns.begin;
        Term held[kMaxWindowTaps];  // at a pixel some of whose taps are beyond the source
        for (int64_t j = rows.columns.begin, pixels; j < rows.columns.end; j += pixels) {
          if (rows.inner.begin <= j && j < rows.inner.end) {
            pixels = rows.inner.end - j;
            products.terms = terms_ + (first - layer_.taps);
            products.count = last - first;
          } else {
            pixels = 1;
            products.terms = held;
            products.count = 0;
            for (const Tap* tap = first; tap < last; ++tap) {
              const int64_t at = j * layer_.source_step.column + tap->column;
              if (held_.columns.begin <= at && at < held_.columns.end)
                held[products.count++] = terms_[tap - layer_.taps];
            }
          }
          products.source = start + j * products.step;
          use(products, row, j * step.column + column, pixels);
        }
      }
    }
  }

 private:
  static constexpr int64_t kMaxColumn = int64_t{1} << 60;

  // Of a grid: its rows and columns in the region, and the columns whose taps are all held.
  struct GridRows {
    Span rows, columns, inner;
  };

  // The first multiple of `step` that is not below `value`, in steps; none is below 0.
  static int64_t steps_to(int64_t value, int64_t step) {
    return value <= 0 ? 0 : step == 1 ? value : (value + step - 1) / step;
  }

  const Depthwise& layer_;
  Region held_, region_;
  int64_t row_step_, step_;
  GridRows rows_[kMaxGrids];
  Term terms_[kMaxWindowTaps];
};

// Where the products of some blocks of a tile come from and go to: the first one's; the next one's are kLanes floats
// on, in the source `next`. A target that is a copy has one block. bias and added may be null.
struct TileProducts {
  int64_t blocks, next;
  const float *source, *bank, *bias;
  Pixels target, added;
  Activation activation;
  float slope;
};

// Row by row, all blocks of each: in the caller's map they lie beside each other.
inline void depthwise_products(const TileRows& rows, const Triple& target_step, const TileProducts& tile) {
  RowEnd end;
  end.activation = tile.activation;
  end.slope = tile.slope;
  end.target_step = tile.target.step * target_step.column;
  end.next = tile.target.step == kLanes ? 0 : tile.target.row_step * target_step.row;
  end.added_step = tile.added.step * target_step.column;
  rows.for_each(tile.source, tile.bank, [&](RowProducts products, int64_t row, int64_t column, int64_t pixels) {
    for (int64_t b = 0; b < tile.blocks; ++b) {
      const int64_t lane = b * kLanes;
      end.start = tile.bias ? load(tile.bias + lane) : zero();
      end.target = tile.target.at(row, column) + lane;
      end.added = tile.added.data ? tile.added.at(row, column) + lane : nullptr;
      depthwise_row(products, pixels, end);
      products.source += tile.next;
      products.bank += kLanes;
    }
  });
}

// sums[tap] += source, moved by the tap, * gradient.
inline void depthwise_gradient(const TileRows& rows, const float* source, const Pixels& gradient, float* sums,
                               float* bias) {
  rows.for_each(source, nullptr, [&](const RowProducts& products, int64_t row, int64_t column, int64_t pixels) {
    depthwise_sums(products, gradient.at(row, column), pixels, sums, bias);
  });
}

// Whether x is read where it lies, if it can be. A copy costs a load and a store for each pixel, and gives the taps
// that meet it constant places: by a stride of 2 the forward of 3x3 takes 0.69 of its time in place, 5x5 0.88; without
// one 1.1.
WNFUSED_INLINE bool reads_in_place(const Depthwise& layer) {
  constexpr int64_t kFewTaps = 7;  // of a pixel of the source
  return layer.planes <= kFewTaps * layer.source_step.row * layer.source_step.column;
}

// What a region of x's map reads of it: in place, or a copy with zeros around. `scratch`: a room for each block of x,
// and one more.
inline TileSource tile_input(const Depthwise& layer, const ExternalMap& given, const MapShape& shape, int64_t image,
                             const Span& blocks, const Region& held, int64_t room, float* scratch) {
  const Region inside = inside_of(shape, held);
  const int64_t last = blocks.end - 1;
  if (reads_in_place(layer) && lies_open_in_floats(given, shape, last))
    return {inside, open_floats(given, image, blocks.begin, inside), kLanes};
  const TileSource padded{held, packed_pixels(scratch, held), room * kLanes};
  const auto pad = [&](const auto& x, int64_t count, float* target) __attribute__((always_inline)) {
    pad_regions(held, inside, count, room, target, [&](int64_t row) {
      const auto* source = x.at(row, 0);
      return [source, step = x.step](int64_t t, int64_t b) { return load(source + t * step + b * kLanes); };
    });
  };
  if (lies_open(given, shape, last)) {
    with_entries(given, [&](auto* entries) __attribute__((always_inline)) {
      pad(open_pixels(given, entries, image, blocks.begin, inside), blocks.count(), scratch);
    });
    return padded;
  }
  float* copy = scratch + blocks.count() * room * kLanes;
  for (int64_t b = 0; b < blocks.count(); ++b)
    pad(read_region(given, shape, image, blocks.begin + b, inside, copy), 1, scratch + b * padded.next);
  return padded;
}

// Some blocks of tile `index`. `scratch`: a room for each block of x, and one more; two for y.
inline void depthwise_forward_item(const ConvForward<Depthwise>& job, const DepthwiseRoom& room, int64_t index,
                                   const Span& blocks, const Bank& bank, float* scratch) {
  const Depthwise& layer = job.geometry;
  const int64_t image = index / layer.tiles.product();
  const Region region = layer.tile(layer.target, index), held = layer.reach(region);
  const TileSource x = tile_input(layer, job.x.given, layer.source, image, blocks, held, room.x, scratch);
  const TileRows rows(layer, x, region, layer.plane_stride);
  float *y_copy = scratch + (blocks.count() + 1) * room.x * kLanes, *added_copy = y_copy + room.y * kLanes;
  const ExternalMap &given = job.y.given, &residual = job.residual.given;
  const bool open = lies_open_in_floats(given, layer.target, blocks.end - 1) &&
                    (!residual.data || lies_open_in_floats(residual, layer.target, blocks.end - 1));
  const int64_t at_once = open ? blocks.count() : 1;
  for (int64_t b = 0; b < blocks.count(); b += at_once) {
    const int64_t block = blocks.begin + b;
    Pixels added{};
    if (residual.data) added = read_region(residual, layer.target, image, block, region, added_copy);
    const Pixels y = target_region(given, layer.target, image, block, region, y_copy);
    depthwise_products(rows, layer.target_step,
                       {at_once, x.next, x.pixels.data + b * x.next, bank.weights + block * kLanes,
                        bank.bias + block * kLanes, y, added, job.activation, job.slope});
    write_region(given, layer.target, image, block, region, y_copy);
  }
}

// dz = dy where the activation was passed, else `slope` of it; with zeros around. `scratch`: a room for each block of
// y, and two more.
inline Pixels padded_gradient(const ConvBackward<Depthwise>& job, int64_t image, const Span& blocks,
                              const Region& held, int64_t room, float* scratch) {
  const MapShape& shape = job.output;
  const Region inside = inside_of(shape, held);
  const Block slope = splat(job.activation == Activation::kLeakyRelu ? job.slope : 0.0f);
  const bool masked = job.activation != Activation::kNone, leaky = job.activation == Activation::kLeakyRelu;
  const auto pad = [&](const auto& dy, const auto& y, int64_t count, float* target) __attribute__((always_inline)) {
    pad_regions(held, inside, count, room, target, [&](int64_t row) {
      return [&, gradient = dy.at(row, 0), passed = masked ? y.at(row, 0) : nullptr](int64_t t, int64_t b) {
        const Block value = load(gradient + t * dy.step + b * kLanes);
        if (!masked) return value;
        const Block activation = load(passed + t * y.step + b * kLanes);
        return leaky ? leaky_mask(activation, value, slope) : relu_mask(activation, value);
      };
    });
  };
  const int64_t last = blocks.end - 1;
  if (lies_open(job.dy.given, shape, last) && (!masked || lies_open(job.y.given, shape, last))) {
    with_entries(job.dy.given, [&](auto* entries) __attribute__((always_inline)) {
      const auto dy = open_pixels(job.dy.given, entries, image, blocks.begin, inside);
      auto* signs = static_cast<decltype(entries)>(job.y.given.data);
      auto y = dy;
      if (masked) y = open_pixels(job.y.given, signs, image, blocks.begin, inside);
      pad(dy, y, blocks.count(), scratch);
    });
    return packed_pixels(scratch, held);
  }
  float* copy = scratch + blocks.count() * room * kLanes;
  for (int64_t b = 0; b < blocks.count(); ++b) {
    const Pixels dy = read_region(job.dy.given, shape, image, blocks.begin + b, inside, copy);
    Pixels y{};
    if (masked) y = read_region(job.y.given, shape, image, blocks.begin + b, inside, copy + room * kLanes);
    pad(dy, y, 1, scratch + b * room * kLanes);
  }
  return packed_pixels(scratch, held);
}

// Sums of the gradients of a block: [tap][16], then the bias's.
WNFUSED_INLINE int64_t sum_floats(const Depthwise& layer) { return (layer.planes + 1) * kLanes; }

// Some blocks of tile `index`: dx by the weights of `bank`; their sums, where they are wanted. `scratch`: a room for
// each block of y, and two more; one for each of x, and one more; one for dx.
inline void depthwise_backward_item(const ConvBackward<Depthwise>& job, const DepthwiseRoom& room, int64_t index,
                                    const Span& blocks, const Bank& bank, float* sums, float* scratch) {
  const Depthwise &forward = job.geometry, &back = job.back;
  const int64_t image = index / forward.tiles.product();
  const Region own = forward.tile(job.output, index), held = gradient_region(forward, back, index);
  const Region around = forward.reach(own), region = back.tile(job.input, index);
  float *dz_copy = scratch, *x_copy = dz_copy + (blocks.count() + 2) * room.y * kLanes;
  float* dx_copy = x_copy + (blocks.count() + 1) * room.x * kLanes;
  const Pixels all_dz = padded_gradient(job, image, blocks, held, room.y, dz_copy);
  const bool weight = job.weight && own.pixels(), input = job.dx.given.data && region.pixels();
  TileSource x{};
  if (weight) x = tile_input(forward, job.x.given, job.input, image, blocks, around, room.x, x_copy);
  const TileRows weight_rows(forward, x, own, kLanes);
  const TileRows input_rows(back, {held, all_dz, room.y * kLanes}, region, back.plane_stride);
  for (int64_t b = 0; b < blocks.count(); ++b) {
    const int64_t block = blocks.begin + b;
    const Pixels dz{all_dz.data + b * room.y * kLanes, all_dz.row_step, all_dz.step};
    const Pixels own_dz{dz.at(own.rows.begin - held.rows.begin, own.columns.begin - held.columns.begin), dz.row_step,
                        dz.step};
    if (job.dz.given.data && own.pixels()) {
      float* copy = dz_copy + blocks.count() * room.y * kLanes;
      const Pixels target = target_region(job.dz.given, job.output, image, block, own, copy);
      for (int64_t row = 0; row < own.rows.count(); ++row)
        for (int64_t t = 0; t < own.columns.count(); ++t) store(target.at(row, t), load(own_dz.at(row, t)));
      write_region(job.dz.given, job.output, image, block, own, copy);
    }
    if (weight) {
      float* sum = sums + b * sum_floats(forward);
      depthwise_gradient(weight_rows, x.pixels.data + b * x.next, own_dz, sum, sum + forward.planes * kLanes);
    }
  }
  if (!input) return;
  const int64_t at_once = lies_open_in_floats(job.dx.given, job.input, blocks.end - 1) ? blocks.count() : 1;
  for (int64_t b = 0; b < blocks.count(); b += at_once) {
    const int64_t block = blocks.begin + b;
    const Pixels dx = target_region(job.dx.given, job.input, image, block, region, dx_copy);
    depthwise_products(input_rows, back.target_step,
                       {at_once,
                        room.y * kLanes,
                        all_dz.data + b * room.y * kLanes,
                        bank.weights + block * kLanes,
                        nullptr,
                        dx,
                        {},
                        Activation::kNone,
                        0.0f});
    write_region(job.dx.given, job.input, image, block, region, dx_copy);
  }
}

}  // namespace wnfused::cpu::WNFUSED_ISA

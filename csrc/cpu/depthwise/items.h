// The items of depthwise layers (depthwise.h): all that is done with one tile of the map.
#pragma once

#include "cpu/conv/layer_job.h"
#include "cpu/depthwise/tiles.h"

namespace wnfused::cpu::WNFUSED_ISA {

// The rows of each grid in a region of the target, and the taps that they meet in a padded region of the source: alike
// for every block.
class TileRows {
 public:
  TileRows(const Depthwise& layer, const Region& held, const Region& region, int64_t plane_stride)
      : layer_(layer), held_(held), region_(region) {
    const auto at_least = [](int64_t value, int64_t step) {
      return value <= 0 ? 0 : step == 1 ? value : (value + step - 1) / step;
    };
    const Triple step = layer.target_step;
    const int64_t pitch = held.columns.count();
    for (int64_t g = 0; g < layer.grid_count; ++g) {
      const Grid& grid = layer.grids[g];
      const int64_t i = at_least(region.rows.begin - grid.origin.row, step.row);
      const int64_t j = at_least(region.columns.begin - grid.origin.column, step.column);
      rows_[g] = {{i, at_least(region.rows.end - grid.origin.row, step.row)},
                  {j, at_least(region.columns.end - grid.origin.column, step.column)}};
      for (int64_t k = grid.first_tap; k < grid.first_tap + grid.taps; ++k) {
        const Tap& tap = layer.taps[k];
        terms_[k] = {tap.plane * plane_stride, (tap.row * pitch + tap.column) * kLanes};
      }
    }
  }

  // Calls use(products, row, column, pixels) for every one: where it begins in the region, and how many pixels it has.
  template <class Use>
  WNFUSED_INLINE void for_each(const float* source, const float* bank, const Use& use) const {
    const Triple step = layer_.target_step;
    for (int64_t g = 0; g < layer_.grid_count; ++g) {
      const Grid& grid = layer_.grids[g];
      const Region& rows = rows_[g];
      if (rows.columns.count() <= 0) continue;
      const int64_t pitch = held_.columns.count();
      const int64_t column = rows.columns.begin * layer_.source_step.column - held_.columns.begin;
      RowProducts products{nullptr, 0, nullptr, bank, layer_.source_step.column * kLanes};
      for (int64_t i = rows.rows.begin; i < rows.rows.end; ++i) {
        const int64_t line = i * layer_.source_step.row;
        // The taps are in the order of their rows, so those that meet rows of the map are neighbours.
        const Tap *first = layer_.taps + grid.first_tap, *last = first + grid.taps;
        const auto meets = [&](const Tap& tap) {
          return held_.rows.begin <= line + tap.row && line + tap.row < held_.rows.end;
        };
        while (first < last && !meets(*first)) ++first;
        while (first < last && !meets(last[-1])) --last;
        products.terms = terms_ + (first - layer_.taps);
        products.count = last - first;
        products.source = source + ((line - held_.rows.begin) * pitch + column) * kLanes;
        use(products, i * step.row + grid.origin.row - region_.rows.begin,
            rows.columns.begin * step.column + grid.origin.column - region_.columns.begin, rows.columns.count());
      }
    }
  }

 private:
  const Depthwise& layer_;
  Region held_, region_;
  Region rows_[kMaxGrids];
  Term terms_[kMaxWindowTaps];
};

// Where the products of some blocks of a tile come from and go to: the first one's; the next one's are kLanes floats on,
// in the padded source `room` pixels. A target that is a copy has one block. bias and added may be null.
struct TileProducts {
  int64_t blocks, room;
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
      products.source += tile.room * kLanes;
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

// What a region of x's map reads of it, with zeros around. `scratch`: a room for each block of x, and one more.
inline const float* padded_input(const ExternalMap& given, const MapShape& shape, int64_t image, const Span& blocks,
                           const Region& held, int64_t room, float* scratch) {
  const Region inside = inside_of(shape, held);
  const auto pad = [&](const auto& x, int64_t count, float* target) __attribute__((always_inline)) {
    pad_regions(held, inside, count, room, target, [&](int64_t row) {
      const auto* source = x.at(row, 0);
      return [source, step = x.step](int64_t t, int64_t b) { return load(source + t * step + b * kLanes); };
    });
  };
  if (lies_open(given, shape, blocks.end - 1)) {
    with_entries(given, [&](auto* entries) __attribute__((always_inline)) {
      pad(open_pixels(given, entries, image, blocks.begin, inside), blocks.count(), scratch);
    });
    return scratch;
  }
  float* copy = scratch + blocks.count() * room * kLanes;
  for (int64_t b = 0; b < blocks.count(); ++b)
    pad(read_region(given, shape, image, blocks.begin + b, inside, copy), 1, scratch + b * room * kLanes);
  return scratch;
}

// Some blocks of tile `index`. `scratch`: a room for each block of x, and one more; two for y.
inline void depthwise_forward_item(const ConvForward<Depthwise>& job, const DepthwiseRoom& room, int64_t index,
                                   const Span& blocks, const Bank& bank, float* scratch) {
  const Depthwise& layer = job.geometry;
  const int64_t image = index / layer.tiles.product();
  const Region region = layer.tile(layer.target, index), held = layer.reach(region);
  const float* x = padded_input(job.x.given, layer.source, image, blocks, held, room.x, scratch);
  const TileRows rows(layer, held, region, layer.plane_stride);
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
                       {at_once, room.x, x + b * room.x * kLanes, bank.weights + block * kLanes,
                        bank.bias + block * kLanes, y, added, job.activation, job.slope});
    write_region(given, layer.target, image, block, region, y_copy);
  }
}

// dz = dy where the activation was passed, else `slope` of it; with zeros around. `scratch`: a room for each block of y,
// and two more.
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
  const Depthwise &forward = job.geometry, &back = job.transposed;
  const int64_t image = index / forward.tiles.product();
  const Region own = forward.tile(job.output, index), held = gradient_region(forward, back, index);
  const Region around = forward.reach(own), region = back.tile(job.input, index);
  float *dz_copy = scratch, *x_copy = dz_copy + (blocks.count() + 2) * room.y * kLanes;
  float* dx_copy = x_copy + (blocks.count() + 1) * room.x * kLanes;
  const Pixels all_dz = padded_gradient(job, image, blocks, held, room.y, dz_copy);
  const bool weight = job.weight && own.pixels(), input = job.dx.given.data && region.pixels();
  const float* x = weight ? padded_input(job.x.given, job.input, image, blocks, around, room.x, x_copy) : nullptr;
  const TileRows weight_rows(forward, around, own, kLanes), input_rows(back, held, region, back.plane_stride);
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
      depthwise_gradient(weight_rows, x + b * room.x * kLanes, own_dz, sum, sum + forward.planes * kLanes);
    }
  }
  if (!input) return;
  const int64_t at_once = lies_open_in_floats(job.dx.given, job.input, blocks.end - 1) ? blocks.count() : 1;
  for (int64_t b = 0; b < blocks.count(); b += at_once) {
    const int64_t block = blocks.begin + b;
    const Pixels dx = target_region(job.dx.given, job.input, image, block, region, dx_copy);
    depthwise_products(input_rows, back.target_step,
                       {at_once, room.y, all_dz.data + b * room.y * kLanes, bank.weights + block * kLanes, nullptr, dx,
                        {}, Activation::kNone, 0.0f});
    write_region(job.dx.given, job.input, image, block, region, dx_copy);
  }
}

}  // namespace wnfused::cpu::WNFUSED_ISA

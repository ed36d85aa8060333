// Register tiles and items of depthwise layers (depthwise.h).
#pragma once

#include <utility>

#include "conv_layer.h"
#include "depthwise.h"
#include "stage_epilogue.h"
#include "stage_maps.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Accumulators of a tile, beside the operands.
constexpr int kDepthwisePixels = kParts == 1 ? 16 : kParts == 2 ? 5 : 2;
constexpr int kDepthwiseTaps = kParts == 1 ? 9 : kParts == 2 ? 5 : 2;

// Pixels of one block of channels, of a map of the caller's or a worker's own: `step` floats from one to the next.
struct Pixels {
  float* data;
  int64_t row_step, step;

  float* at(int64_t row, int64_t column) const { return data + row * row_step + column * step; }
};

// The pixels of a region, one row after another.
WNFUSED_INLINE Pixels packed_pixels(float* data, const Region& region) {
  return {data, region.columns.count() * kLanes, kLanes};
}

// Whether a block of a map can be read and written where it is.
WNFUSED_INLINE bool lies_open(const ExternalMap& map, const MapShape& shape, int64_t block) {
  return interleaved(map) && shape.channels - block * kLanes >= kLanes;
}

WNFUSED_INLINE Pixels open_pixels(const ExternalMap& map, int64_t image, int64_t block, const Region& region) {
  const int64_t first = region.rows.begin * map.row_stride + region.columns.begin * map.column_stride;
  return {static_cast<float*>(map.data) + image * map.image_stride + block * kLanes + first, map.row_stride,
          map.column_stride};
}

// Calls use(run, pixel) for the runs of consecutive pixels that a region consists of; `pixel` counts through them.
template <class Use>
WNFUSED_INLINE void for_runs(const MapShape& shape, int64_t image, const Region& region, const Use& use) {
  const int64_t columns = region.columns.count();
  if (columns == shape.width)
    return use(PixelRun{image, region.rows.begin * columns, region.rows.end * columns}, int64_t{0});
  for (int64_t row = region.rows.begin; row < region.rows.end; ++row) {
    const int64_t begin = row * shape.width + region.columns.begin;
    use(PixelRun{image, begin, begin + columns}, (row - region.rows.begin) * columns);
  }
}

// A region of a map, within the map: where it is, or a copy.
inline Pixels read_region(const ExternalMap& map, const MapShape& shape, int64_t image, int64_t block,
                          const Region& region, float* copy) {
  if (lies_open(map, shape, block)) return open_pixels(map, image, block, region);
  const MapShape one = some_blocks(shape, block, 1);
  for_runs(shape, image, region, [&](const PixelRun& run, int64_t pixel) {
    read_pixels(one, some_blocks(map, block), run, copy + pixel * kLanes);
  });
  return packed_pixels(copy, region);
}

// Where to write a region, and what is left to do once it is written.
inline Pixels target_region(const ExternalMap& map, const MapShape& shape, int64_t image, int64_t block,
                            const Region& region, float* copy) {
  return lies_open(map, shape, block) ? open_pixels(map, image, block, region) : packed_pixels(copy, region);
}

inline void write_region(const ExternalMap& map, const MapShape& shape, int64_t image, int64_t block,
                         const Region& region, const float* copy) {
  if (lies_open(map, shape, block)) return;
  const MapShape one = some_blocks(shape, block, 1);
  for_runs(shape, image, region, [&](const PixelRun& run, int64_t pixel) {
    write_pixels(one, copy + pixel * kLanes, run, some_blocks(map, block));
  });
}

// ------------------------------------------------------------------------------------------------------ padded copies

WNFUSED_INLINE void clear_pixels(float* data, int64_t count) {
  for (int64_t t = 0; t < count; ++t) store(data + t * kLanes, zero());
}

WNFUSED_INLINE int64_t greater(int64_t a, int64_t b) { return a < b ? b : a; }

// The part of a padded region that the map has.
WNFUSED_INLINE Region inside_of(const MapShape& shape, const Region& region) {
  const int64_t begin = smaller(greater(region.columns.begin, 0), region.columns.end);
  return {region.rows, {begin, greater(smaller(region.columns.end, shape.width), begin)}};
}

// Fills the padded regions of some blocks, `room` pixels from one to the next: zeros around what is `inside`, and there
// value(row)(t, b). All blocks of a pixel in turn, since they lie beside each other in the caller's map.
template <class Value>
WNFUSED_INLINE Pixels pad_regions(const Region& region, const Region& inside, int64_t blocks, int64_t room, float* copy,
                                  const Value& value) {
  const Pixels pixels = packed_pixels(copy, region);
  const int64_t before = inside.columns.begin - region.columns.begin, width = inside.columns.count();
  const int64_t after = region.columns.end - inside.columns.end, stride = room * kLanes;
  for (int64_t row = 0; row < region.rows.count(); ++row) {
    for (int64_t b = 0; b < blocks; ++b) {
      clear_pixels(pixels.at(row, 0) + b * stride, before);
      clear_pixels(pixels.at(row, before + width) + b * stride, after);
    }
    const auto of_row = value(row);
    float* target = pixels.at(row, before);
    for (int64_t t = 0; t < width; ++t, target += kLanes)
      for (int64_t b = 0; b < blocks; ++b) store(target + b * stride, of_row(t, b));
  }
  return pixels;
}

// ------------------------------------------------------------------------------------------------------ register tiles

// One tap of a grid: where its weights, or their sums, lie in a bank of one block, and where it meets the source from a
// unit's own place, in floats.
struct Term {
  int64_t plane, source;
};

// What becomes of a row's sums.
struct RowEnd {
  Block start;  // the bias
  const float* added;
  int64_t added_step;
  float* target;
  int64_t target_step;
  int64_t next;  // from a row of the target to the next one that is written, where no cache has that; else 0
  Activation activation;
  float slope;
};

// A row's products, and what is read for them. step: floats of the source from one pixel to the next.
struct RowProducts {
  const Term* terms;
  int64_t count;
  const float *source, *bank;
  int64_t step;
};

// Pixels [first, first + Count) of a row. Step: pixels of the source from one to the next, 0 for any number.
template <int Count, int Step>
inline void depthwise_tile(const RowProducts& row, int64_t first, const RowEnd& end) {
  const int64_t step = Step ? Step * kLanes : row.step;
  const float *source = row.source + first * step, *bank = row.bank;
  float* target = end.target + first * end.target_step;
  if (end.next) {
    WNFUSED_UNROLL for (int t = 0; t < Count; ++t) prefetch_for_writing(target + t * end.target_step + end.next);
  }
  Block sum[Count];
  WNFUSED_UNROLL for (int t = 0; t < Count; ++t) sum[t] = end.start;
  for (const Term *term = row.terms, *last = term + row.count; term < last; ++term) {
    const Block weight = load(bank + term->plane);
    const float* at = source + term->source;
    WNFUSED_UNROLL for (int t = 0; t < Count; ++t) sum[t] = multiply_add(load(at + t * step), weight, sum[t]);
  }
  if (end.added) {
    const float* added = end.added + first * end.added_step;
    WNFUSED_UNROLL for (int t = 0; t < Count; ++t) sum[t] = load(added + t * end.added_step) + sum[t];
  }
  if (end.activation == Activation::kRelu) {
    WNFUSED_UNROLL for (int t = 0; t < Count; ++t) sum[t] = relu(sum[t]);
  } else if (end.activation == Activation::kLeakyRelu) {
    // Of an infinity too.
    WNFUSED_UNROLL for (int t = 0; t < Count; ++t) sum[t] = leaky_mask(sum[t], sum[t], splat(end.slope));
  }
  WNFUSED_UNROLL for (int t = 0; t < Count; ++t) store(target + t * end.target_step, sum[t]);
}

template <int Step, int... Counts>
WNFUSED_INLINE auto depthwise_tile_of(int64_t count, std::integer_sequence<int, Counts...>) {
  using Tile = void (*)(const RowProducts&, int64_t, const RowEnd&);
  static constexpr Tile tiles[] = {depthwise_tile<Counts + 1, Step>...};
  return tiles[count - 1];
}

inline void depthwise_row(const RowProducts& row, int64_t pixels, const RowEnd& end) {
  constexpr std::make_integer_sequence<int, kDepthwisePixels> counts;
  for (int64_t first = 0; first < pixels;) {
    // Tiles of one length, rather than full ones and a rest that is too short to fill the processor's pipes.
    const int64_t count = divide_up(pixels - first, divide_up(pixels - first, kDepthwisePixels));
    const auto tile = row.step == kLanes       ? depthwise_tile_of<1>(count, counts)
                      : row.step == 2 * kLanes ? depthwise_tile_of<2>(count, counts)
                                               : depthwise_tile_of<0>(count, counts);
    tile(row, first, end);
    first += count;
  }
}

// sums[tap] += source * gradient over a row of pixels, for `Count` taps; kBias: and the last of the sums += gradient.
template <int Count, bool kBias>
inline void depthwise_sum_tile(const RowProducts& row, const Term* terms, const float* gradient, int64_t pixels,
                               float* sums, float* bias) {
  Block sum[Count + 1];
  const float* source[Count + 1];
  WNFUSED_UNROLL for (int k = 0; k < Count; ++k) {
    sum[k] = load(sums + terms[k].plane);
    source[k] = row.source + terms[k].source;
  }
  if (kBias) sum[Count] = load(bias);
  for (int64_t t = 0, at = 0; t < pixels; ++t, at += row.step) {
    const Block value = load(gradient + t * kLanes);
    WNFUSED_UNROLL for (int k = 0; k < Count; ++k) sum[k] = multiply_add(load(source[k] + at), value, sum[k]);
    if (kBias) sum[Count] = sum[Count] + value;
  }
  WNFUSED_UNROLL for (int k = 0; k < Count; ++k) store(sums + terms[k].plane, sum[k]);
  if (kBias) store(bias, sum[Count]);
}

template <bool kBias, int... Counts>
WNFUSED_INLINE auto depthwise_sum_tile_of(int64_t count, std::integer_sequence<int, Counts...>) {
  using Tile = void (*)(const RowProducts&, const Term*, const float*, int64_t, float*, float*);
  static constexpr Tile tiles[] = {depthwise_sum_tile<Counts, kBias>...};
  return tiles[count];
}

inline void depthwise_sums(const RowProducts& row, const float* gradient, int64_t pixels, float* sums, float* bias) {
  constexpr std::make_integer_sequence<int, kDepthwiseTaps + 1> counts;
  const int64_t first = smaller(kDepthwiseTaps, row.count);
  depthwise_sum_tile_of<true>(first, counts)(row, row.terms, gradient, pixels, sums, bias);
  for (int64_t k = first; k < row.count;) {
    const int64_t count = smaller(kDepthwiseTaps, row.count - k);
    depthwise_sum_tile_of<false>(count, counts)(row, row.terms + k, gradient, pixels, sums, bias);
    k += count;
  }
}

// --------------------------------------------------------------------------------------------------- a tile's products

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

// --------------------------------------------------------------------------------------------------------------- items

// What a region of x's map reads of it, with zeros around. `scratch`: a room for each block of x, and one more.
inline const float* padded_input(const ExternalMap& given, const MapShape& shape, int64_t image, const Span& blocks,
                           const Region& held, int64_t room, float* scratch) {
  const Region inside = inside_of(shape, held);
  const auto pad = [&](const Pixels& x, int64_t count, float* target) {
    return pad_regions(held, inside, count, room, target, [&](int64_t row) {
      const float* source = x.at(row, 0);
      return [source, step = x.step](int64_t t, int64_t b) { return load(source + t * step + b * kLanes); };
    });
  };
  if (lies_open(given, shape, blocks.end - 1))
    return pad(open_pixels(given, image, blocks.begin, inside), blocks.count(), scratch), scratch;
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
  const bool open = lies_open(given, layer.target, blocks.end - 1) &&
                    (!residual.data || lies_open(residual, layer.target, blocks.end - 1));
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
  const auto pad = [&](const Pixels& dy, const Pixels& y, int64_t count, float* target) {
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
    Pixels y{};
    if (masked) y = open_pixels(job.y.given, image, blocks.begin, inside);
    pad(open_pixels(job.dy.given, image, blocks.begin, inside), y, blocks.count(), scratch);
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
  const int64_t at_once = lies_open(job.dx.given, job.input, blocks.end - 1) ? blocks.count() : 1;
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

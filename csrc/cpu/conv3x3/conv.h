// One convolution: 3x3, stride 1, zero padding 1, C to C in a stage, over a chunk of rows. (3x3x3: the products of
// three panels, of neighbouring levels, with three banks, summed.)
//
//        gather                         multiply                          scatter
//   map  ------>  panel                 -------->  product                ------>  map
//        zeros    [step][rows][16]      with bank  [plane][block][rows][16]        epilogue
//        outside
//
//   Winograd: a row is a tile, its patch is transformed into 16 (or 36) planes of depth C; as many products,
//             transformed back.
//   direct:   a row is a pixel, the taps that touch the map lie one after another along the depth; one product.
//
// Cache: at C = 16, 2x2 tiles and 16 rows panel, product and bank are 16 KB each, the first-level cache; otherwise the
// planes of a bank stream from the second level, 64 bytes to each 16 (or 32) rows of multiply-adds.
// Floor per convolution: 4 C^2 or 2.25 C^2 (direct: 9 C^2) multiply-adds and 8 C bytes a pixel.
#pragma once

#include "cpu/conv/epilogue.h"
#include "cpu/conv3x3/winograd.h"
#include "cpu/products/register_tiles.h"
#include "cpu/vec/prefetch.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Planes of [blocks][rows][16] floats; by_blocks, blocks of [planes][rows][16]. The plane stride is odd in cache lines,
// so that the 16 stores of a transform fall into different cache sets.
struct Panel {
  float* data;
  int64_t rows;
  int64_t plane_stride, block_stride;

  Panel(float* data, int64_t rows, int64_t blocks)
      : data(data), rows(rows), plane_stride((blocks * rows | 1) * kLanes), block_stride(rows * kLanes) {}

  static Panel by_blocks(float* data, int64_t rows, int64_t planes) {
    Panel panel(data, rows, 1);
    panel.block_stride = planes * panel.plane_stride;
    return panel;
  }

  float* at(int64_t plane, int64_t block, int64_t row) const {
    return data + plane * plane_stride + block * block_stride + row * kLanes;
  }

  // Another one, behind so many planes.
  Panel after(int64_t planes) const {
    Panel other = *this;
    other.data += planes * plane_stride;
    return other;
  }
};

WNFUSED_INLINE int64_t round_up_rows(int64_t rows) { return (rows + kRowMultiple - 1) / kRowMultiple * kRowMultiple; }

// The pixel (direct) or the top left pixel of the tile (Winograd) of a row.
struct Unit {
  int64_t image, y, x;
};

// Winograd numbers tiles image by image. The direct method numbers pixels position by position, all images at one
// position in turn, so that a panel of many small images skips the taps outside the map altogether.
WNFUSED_INLINE Unit unit_at(const Geometry& geometry, int64_t index) {
  if (geometry.is_winograd()) {
    const int64_t column = index % geometry.tile_cols, rest = index / geometry.tile_cols;
    return {rest / geometry.tile_rows, geometry.tile * (rest % geometry.tile_rows), geometry.tile * column};
  }
  const int64_t position = index / geometry.images;
  return {index % geometry.images, position / geometry.width, position % geometry.width};
}

WNFUSED_INLINE void advance(const Geometry& geometry, Unit& unit) {
  if (geometry.is_winograd()) {
    unit.x += geometry.tile;
    if (unit.x < geometry.width) return;
    unit.x = 0;
    unit.y += geometry.tile;
    if (unit.y < geometry.height) return;
    unit.y = 0;
    ++unit.image;
  } else {
    if (++unit.image < geometry.images) return;
    unit.image = 0;
    if (++unit.x < geometry.width) return;
    unit.x = 0;
    ++unit.y;
  }
}

WNFUSED_INLINE int64_t pixel_index(const Geometry& geometry, const Unit& unit) {
  return (unit.image * geometry.height + unit.y) * geometry.width + unit.x;
}

// Rows past the end of a chunk are multiplied too: make them zeros.
inline void clear_rows(const Panel& panel, int64_t planes, int64_t blocks, int64_t begin, int64_t end) {
  for (int64_t p = 0; p < planes; ++p)
    for (int64_t b = 0; b < blocks; ++b)
      for (int64_t r = begin; r < end; ++r) store(panel.at(p, b, r), zero());
}

// Tiles that lie side by side in one row of tiles.
struct TileRun {
  int64_t row;  // of the panel, of the first tile
  int64_t tiles;
  Unit unit;  // of the first tile
};

WNFUSED_INLINE TileRun run_at(const Geometry& geometry, int64_t first, int64_t row, int64_t count) {
  const Unit unit = unit_at(geometry, first + row);
  return {row, smaller(count - row, geometry.tile_cols - unit.x / geometry.tile), unit};
}

// Whether the level that is `step` from an image's own is one of the same volume.
WNFUSED_INLINE bool has_level(const Geometry& geometry, int64_t image, int64_t step) {
  if (step == 0) return true;
  const int64_t level = image % geometry.levels + step;
  return level >= 0 && level < geometry.levels;
}

// Pixels of a line that are transformed together.
constexpr int kTogether = 16;

// Patches of `count` tiles, on the level that is `step` from theirs, transformed: plane p of block b, row t. So many
// blocks count from `map`, the first of the channels that the outputs sum over. Neighbours in a run overlap in two
// columns: first B' d of all columns of the run, then the rows of (B' d) B tile by tile.
template <int M, bool Round>
inline void gather_tiles(const Geometry& geometry, const float* map, const float* zeros, int64_t first, int64_t count,
                         int64_t step, int64_t blocks, const Panel& panel) {
  constexpr int kPatch = M + 2, kColumn = kPatch * kLanes;
  const int64_t channels = geometry.padded_channels, line = geometry.width * channels, width = geometry.width;
  alignas(64) float columns[(kTogether + 2) * kColumn];
  for (int64_t row = 0; row < count;) {
    TileRun run = run_at(geometry, first, row, count);
    run.tiles = smaller(run.tiles, kTogether / M);
    const bool inside = has_level(geometry, run.unit.image, step);
    const float* image = map + (run.unit.image + step) * geometry.height * line;
    const float* lines[kPatch];
    for (int i = 0; i < kPatch; ++i) {
      const int64_t y = run.unit.y - 1 + i;
      lines[i] = inside && y >= 0 && y < geometry.height ? image + y * line : zeros;
    }
    // Not the next chunk's: those lines may be another core's, and would have to be called back.
    const bool more_below = inside && row + run.tiles < count && run.unit.y + 2 * M < geometry.height;
    const float* below = image + (run.unit.y + M + 1) * line;
    // Columns of the patches that lie in the map, two at least, and those of zeros.
    const int64_t left = run.unit.x - 1, end = run.tiles * M + 2, last = smaller(end, width - left);
    for (int64_t b = 0; b < blocks; ++b) {
      const auto clear = [&](int64_t j) {
        WNFUSED_UNROLL for (int i = 0; i < kPatch; ++i) store(columns + j * kColumn + i * kLanes, zero());
      };
      if (left < 0) clear(0);
      const int64_t begin = left < 0;
      int64_t offset = (left + begin) * channels + b * kLanes;
      for (int64_t j = begin; j < last; ++j, offset += channels) {
        input_column<M, Round>(lines, offset, columns + j * kColumn);
        // The lines that the row of tiles below adds: far ahead for the processor, and saved maps come from memory.
        if (more_below)
          WNFUSED_UNROLL for (int i = 0; i < M; ++i) __builtin_prefetch(below + i * line + offset);
      }
      for (int64_t j = last; j < end; ++j) clear(j);
      float* target = panel.at(0, b, row);
      for (int64_t t = 0; t < run.tiles; ++t, target += kLanes)
        for (int i = 0; i < kPatch; ++i)
          input_transform_row<M>(columns + t * M * kColumn + i * kLanes, target + i * kPatch * panel.plane_stride,
                                 panel.plane_stride);
    }
    row += run.tiles;
  }
  clear_rows(panel, kPatch * kPatch, blocks, count, round_up_rows(count));
}

// Pixels of one tap, for `count` units; returns false where the tap lies outside the map for every one of them.
template <bool Round>
inline bool gather_tap(const Geometry& geometry, const float* map, int64_t first, int64_t count, int tap,
                       const Panel& panel, int64_t plane) {
  const int64_t dy = tap / 3 - 1, dx = tap % 3 - 1, channels = geometry.padded_channels;
  const float* pixel[kMaxPanelRows];
  bool touches = false;
  Unit unit = unit_at(geometry, first);
  for (int64_t t = 0; t < count; ++t, advance(geometry, unit)) {
    const int64_t y = unit.y + dy, x = unit.x + dx;
    const bool inside = y >= 0 && y < geometry.height && x >= 0 && x < geometry.width;
    pixel[t] = inside ? map + pixel_index(geometry, {unit.image, y, x}) * channels : nullptr;
    touches |= inside;
  }
  if (!touches) return false;
  for (int64_t b = 0; b < geometry.depth_blocks; ++b) {
    for (int64_t t = 0; t < count; ++t) {
      Block value = pixel[t] ? load(pixel[t] + b * kLanes) : zero();
      if constexpr (Round) value = round_to_bfloat16(value);
      store(panel.at(plane, b, t), value);
    }
    for (int64_t t = count; t < round_up_rows(count); ++t) store(panel.at(plane, b, t), zero());
  }
  return true;
}

// Block `b` of the product, which is output block `channel_block`, for `count` tiles. False if not all is finite.
// kPlain: the outputs are neither rounded nor saved a second time.
template <int M, Ending kEnding, bool kPlain>
inline bool scatter_tiles(const Geometry& shared_geometry, const Panel& product, int64_t first, int64_t count,
                          int64_t channel_block, int64_t b, const ConvEpilogue<float>& shared_epilogue) {
  // Local copies, so that the compiler need not fear that the stores change them.
  const Geometry geometry = shared_geometry;
  ConvEpilogue<float> epilogue = shared_epilogue;
  if constexpr (kPlain) epilogue.round = false, epilogue.saved.data = nullptr;
  const int64_t plane_stride = product.plane_stride;
  const Block bias = epilogue.bias ? load(epilogue.bias + channel_block * kLanes) : zero();
  Block poison = zero();
  for (int64_t row = 0; row < count;) {
    const TileRun run = run_at(geometry, first, row, count);
    const int64_t lines = geometry.height - run.unit.y;
    const float* source = product.at(0, b, row);
    int64_t pixel = pixel_index(geometry, run.unit), x = run.unit.x;
    for (int64_t t = 0; t < run.tiles; ++t, x += M, pixel += M, source += kLanes) {
      const int64_t columns = geometry.width - x;
      const auto finish = [&](auto all, int i, const Block (&line)[M]) __attribute__((always_inline)) {
        WNFUSED_UNROLL for (int j = 0; j < M; ++j)
          if (all || j < columns)
            finish_pixel<kEnding>(geometry, epilogue, pixel + i * geometry.width + j, channel_block, line[j], bias,
                                  poison);
      };
      output_transform<M>(source, plane_stride, [&](int i, const Block (&line)[M]) __attribute__((always_inline)) {
        if (i >= lines) return;
        if (columns >= M) finish(std::true_type(), i, line);
        else finish(std::false_type(), i, line);
      });
    }
    row += run.tiles;
  }
  return sum_of(poison) == 0.0f;
}

// The same for `count` pixels.
template <Ending kEnding>
inline bool scatter_pixels(const Geometry& shared_geometry, const Panel& product, int64_t first, int64_t count,
                           int64_t channel_block, int64_t b, const ConvEpilogue<float>& shared_epilogue) {
  const Geometry geometry = shared_geometry;
  const ConvEpilogue<float> epilogue = shared_epilogue;
  const Block bias = epilogue.bias ? load(epilogue.bias + channel_block * kLanes) : zero();
  Block poison = zero();
  Unit unit = unit_at(geometry, first);
  for (int64_t t = 0; t < count; ++t, advance(geometry, unit))
    finish_pixel<kEnding>(geometry, epilogue, pixel_index(geometry, unit), channel_block, load(product.at(0, b, t)),
                          bias, poison);
  return sum_of(poison) == 0.0f;
}

template <Ending kEnding>
inline bool scatter(const Geometry& geometry, const Panel& product, int64_t first, int64_t count,
                    int64_t channel_block, int64_t b, const ConvEpilogue<float>& epilogue) {
  const bool plain = !epilogue.round && !epilogue.saved.data;
  const auto run = geometry.method == Method::kWinograd4
                       ? plain ? scatter_tiles<4, kEnding, true> : scatter_tiles<4, kEnding, false>
                   : geometry.method == Method::kWinograd2
                       ? plain ? scatter_tiles<2, kEnding, true> : scatter_tiles<2, kEnding, false>
                       : scatter_pixels<kEnding>;
  return run(geometry, product, first, count, channel_block, b, epilogue);
}

// The lines that a chunk of tiles will write, called to the first level while the chunk is multiplied, a part before
// each plane. Saved maps are written to memory that is in no cache, and a store that misses keeps all that come after
// it waiting.
class OutputLines {
 public:
  // Of `count` tiles from `first` on. map null: its lines are in a cache already.
  OutputLines(const Geometry& geometry, float* map, int64_t first, int64_t count, int64_t first_block, int64_t blocks)
      : map_(map), unit_(unit_at(geometry, first)), left_(map ? count * geometry.tile : 0),
        each_((left_ + geometry.planes - 1) / geometry.planes), first_block_(first_block), blocks_(blocks) {}

  WNFUSED_INLINE void step(const Geometry& geometry) {
    const int64_t channels = geometry.padded_outputs;
    for (int64_t end = left_ - smaller(left_, each_); left_ > end; --left_) {
      if (unit_.y + line_ < geometry.height) {
        const int64_t pixel = pixel_index(geometry, {unit_.image, unit_.y + line_, unit_.x});
        const float* line = map_ + pixel * channels + first_block_ * kLanes;
        const int64_t columns = smaller(geometry.tile, geometry.width - unit_.x);
        for (int64_t j = 0; j < columns; ++j)
          for (int64_t b = 0; b < blocks_; ++b) prefetch_for_writing(line + j * channels + b * kLanes);
      }
      if (++line_ < geometry.tile) continue;
      line_ = 0;
      advance(geometry, unit_);
    }
  }

 private:
  float* map_;
  Unit unit_;         // of the next piece, which is one line of a tile
  int64_t line_ = 0;  // of that tile
  int64_t left_, each_;
  int64_t first_block_, blocks_;
};

// Whether `count` tiles lie in one image.
WNFUSED_INLINE bool is_one_image(const Geometry& geometry, int64_t first, int64_t count) {
  const int64_t tiles = geometry.tile_rows * geometry.tile_cols;
  return first / tiles == (first + count - 1) / tiles;
}

using Gather = void (*)(const Geometry&, const float*, const float*, int64_t, int64_t, int64_t, int64_t,
                        const Panel&);

// Winograd over three dims: the products of every level's panel and bank, summed.
__attribute__((noinline)) inline void convolve_levels(const Geometry& geometry, const float* map, const float* zeros,
                                                      int64_t first, int64_t count, const float* bank,
                                                      const Depth& depth, int64_t blocks, OutputLines& outputs,
                                                      Gather gather, bool gathered, const Panel& panel,
                                                      const Panel& product) {
  PlanePair levels[kMaxLevelTaps];
  int64_t level_count = 0;
  for (int64_t l = 0; l < geometry.level_taps; ++l) {
    const int64_t step = l - geometry.level_taps / 2;
    if (!geometry.meets_level(l)) continue;
    if (!has_level(geometry, unit_at(geometry, first).image, step) && is_one_image(geometry, first, count)) continue;
    const Panel level = panel.after(level_count * geometry.planes);
    if (!gathered) gather(geometry, map, zeros, first, count, step, geometry.depth_blocks, level);
    levels[level_count++] = {level.data, bank + l * geometry.level_bank()};
  }
  for (int64_t p = 0; p < geometry.planes; ++p) {
    outputs.step(geometry);
    multiply_rows(levels, level_count, depth, round_up_rows(count), blocks, geometry.block_floats(),
                  product.at(p, 0, 0), product.rows * kLanes);
    for (int64_t l = 0; l < level_count; ++l) {
      levels[l].panel += panel.plane_stride;
      levels[l].bank += geometry.plane_stride;
    }
  }
}

// Outputs [first_block, first_block + blocks) of `count` units, before the epilogue. gathered: the panel is theirs
// already.
template <bool Round>
inline void convolve(const Geometry& geometry, const float* map, const float* zeros, int64_t first, int64_t count,
                     const float* bank, int64_t first_block, int64_t blocks, const Ahead& ahead,
                     OutputLines& outputs, bool gathered, const Panel& panel, const Panel& product) {
  const int64_t rows = round_up_rows(count), col_stride = geometry.block_floats();
  const Depth depth{geometry.depth / kLanes, geometry.depth % kLanes, panel.rows * kLanes};
  bank += first_block * col_stride;
  if (geometry.is_winograd()) {
    const Gather gather = geometry.tile == 4 ? gather_tiles<4, Round> : gather_tiles<2, Round>;
    if (geometry.level_taps > 1)
      return convolve_levels(geometry, map, zeros, first, count, bank, depth, blocks, outputs, gather, gathered, panel,
                             product);
    const int64_t columns = ahead.bank ? kCols : blocks;
    const auto fetch = [&](int64_t plane, int64_t column) {
      if (!ahead.bank || rows < 2 * kRowMultiple || plane >= geometry.planes) return;
      const float* data = bank + plane * geometry.plane_stride + column * col_stride;
      const int64_t floats = smaller(columns, blocks - column) * col_stride;
      Upcoming{reinterpret_cast<const char*>(data), floats * 4}.prefetch();
    };
    for (int64_t c = 0; c < blocks; c += columns) fetch(0, c);
    const auto multiply = [&](int64_t plane, int64_t column, int64_t end) {
      while (column < end) {
        const BlockRange met = geometry.met_blocks(first_block + column);
        const int64_t alike = geometry.blocks_alike(first_block + column, end - column);
        const float* filters = bank + plane * geometry.plane_stride + column * col_stride;
        const PlanePair pair{panel.at(plane, met.begin, 0), filters + met.begin * kLanes * kLanes};
        const int64_t channels = geometry.channels_in(met, first_block);
        multiply_rows(&pair, 1, {channels / kLanes, channels % kLanes, depth.panel_step}, rows, alike, col_stride,
                      product.at(plane, column, 0), product.rows * kLanes);
        column += alike;
      }
    };
    if (!gathered) gather(geometry, map, zeros, first, count, 0, geometry.source_blocks(first_block), panel);
    FetchEvenly upcoming(ahead, geometry.planes);
    for (int64_t p = 0; p < geometry.planes; ++p) {
      upcoming.step();
      outputs.step(geometry);
      for (int64_t c = 0; c < blocks; c += columns) {
        fetch(p + 1, c);
        multiply(p, c, smaller(c + columns, blocks));
      }
    }
    return;
  }
  ahead.prefetch();
  PlanePair taps[kTaps];
  int64_t touching = 0;
  for (int tap = 0; tap < kTaps; ++tap)
    if (gather_tap<Round>(geometry, map, first, count, tap, panel, touching)) {
      taps[touching] = {panel.at(touching, 0, 0), bank + tap * geometry.plane_stride};
      ++touching;
    }
  multiply_rows(taps, touching, depth, rows, blocks, col_stride, product.at(0, 0, 0), product.rows * kLanes);
}

// What a worker's item left in its scratch memory for the next one: the panel of a chunk, or those of a slice. Whoever
// else writes to that memory calls forget().
class LeftPanels {
 public:
  enum class Of { kNothing, kChunk, kSlice };

  // Whether they are there already; from now on they are.
  WNFUSED_INLINE bool hold(Of what, int64_t part) {
    const bool same = of_ == what && part_ == part;
    of_ = what;
    part_ = part;
    return same;
  }

  WNFUSED_INLINE void forget() { of_ = Of::kNothing; }

 private:
  Of of_ = Of::kNothing;
  int64_t part_ = 0;
};

// Whether the panel of a convolution's item is there: of a chunk, and of the channels that its outputs sum over.
WNFUSED_INLINE bool finds_panel(const Geometry& geometry, int64_t item, LeftPanels& left) {
  if (geometry.by_bundles) {
    const auto [chunk, bundle] = geometry.conv_item(item);
    const int64_t channels = geometry.group_of(bundle * geometry.conv_bundle_blocks);
    return left.hold(LeftPanels::Of::kChunk, channels * geometry.conv_chunks + chunk);
  }
  left.forget();
  return false;
}

// Item `item` of a convolution: one chunk of units, one bundle of output blocks. gathered: the last item that ran on
// this scratch was one of the same chunk and the same channels, by Winograd's method. A panel that its product
// overwrote is not met again: no other output block sums over its channels.
template <Ending kEnding>
inline void convolution_item(const Geometry& geometry, int64_t item, const float* map, bool round_map,
                             const float* zeros, const float* bank, const ConvEpilogue<float>& epilogue,
                             const Ahead& ahead, float* scratch, std::atomic<bool>& poisoned, bool gathered = false) {
  const auto [chunk, bundle] = geometry.conv_item(item);
  const int64_t first = chunk * geometry.conv_rows, first_block = bundle * geometry.conv_bundle_blocks;
  const int64_t count = smaller(geometry.conv_rows, geometry.units - first);
  const int64_t blocks = smaller(geometry.conv_bundle_blocks, geometry.output_blocks - first_block);
  const Panel panel(scratch, geometry.conv_rows, geometry.depth_blocks);
  // With one block of channels a row's product depends on that row alone and may take its place, which keeps panel and
  // bank together in the first-level cache.
  const bool overwrite = geometry.depth_blocks == 1 && geometry.group_blocks == 1 && geometry.is_winograd();
  float* behind = panel.after(geometry.level_taps * geometry.planes).data;
  const Panel product(overwrite ? scratch : behind, geometry.conv_rows, blocks);
  OutputLines outputs(geometry, epilogue.fresh, first, count, first_block, blocks);
  const auto run = round_map ? convolve<true> : convolve<false>;
  map += geometry.source_block(first_block) * kLanes;
  run(geometry, map, zeros, first, count, bank, first_block, blocks, ahead, outputs, gathered, panel, product);
  for (int64_t b = 0; b < blocks; ++b)
    if (!scatter<kEnding>(geometry, product, first, count, first_block + b, b, epilogue))
      poisoned.store(true, std::memory_order_relaxed);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

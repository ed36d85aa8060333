// One item of a convolution over a window on pairs of bfloat16: a chunk of a grid's lines, a bundle of output blocks.
#pragma once

#include "cpu/conv/epilogue.h"
#include "cpu/conv/pair_panels.h"
#include "cpu/pair_window/pair_window.h"
#include "cpu/products/pairs.h"

namespace wnfused::cpu::WNFUSED_ISA {

// y = act(sum + bias + residual), maps of operands.
struct PairWindowEnding {
  uint16_t* y;
  const uint16_t* residual;  // or null, as bias may be
  const float* bias;
  Activation activation;
  float slope;
};

// Pixels [first, first + count step) of a line of the source, every `step`-th one, as pixels of `padded` elements;
// zeros beyond the map. `line` null: a line beyond the map.
inline void copy_line(const MapShape& source, const uint16_t* line, int64_t first, int64_t step, int64_t count,
                      int64_t padded, uint16_t* target) {
  const auto clear = [&](int64_t pixels) { __builtin_memset(target, 0, pixels * padded * sizeof(uint16_t)); };
  if (!line) return clear(count);
  const int64_t before = smaller(first < 0 ? (-first + step - 1) / step : 0, count);
  const int64_t left = source.width - (first + before * step);
  const int64_t inside = smaller(left > 0 ? (left + step - 1) / step : 0, count - before);
  clear(before);
  target += before * padded;
  copy_padded(line + (first + before * step) * source.channels, step * source.channels, inside, source.channels, padded,
              target);
  target += inside * padded;
  clear(count - before - inside);
}

// A line of an image; null beyond it.
WNFUSED_INLINE const uint16_t* line_of(const MapShape& map, const uint16_t* entries, int64_t image, int64_t line) {
  if (line < 0 || line >= map.height) return nullptr;
  return entries + (image * map.height + line) * map.width * map.channels;
}

// The lines of image `image` of the source that a chunk of a grid meets, as pixels of `pixel` elements; and some zeros
// behind them, where the depth of the last row may end.
inline void gather_image(const PairWindow& window, const PairGrid& grid, const uint16_t* map, const PairChunk& chunk,
                         int64_t image, int64_t pixel, uint16_t* panel) {
  const int64_t line = grid.line_elements(pixel), row0 = grid.source_row + chunk.line * window.row_step;
  const int64_t column0 = grid.source_column + chunk.column * window.column_step;
  const int64_t step = grid.reach_columns > 1 ? 1 : window.column_step;
  const int64_t residues = smaller(window.row_step, grid.reach_rows);
  uint16_t* end = panel;
  for (int64_t residue = 0; residue < residues; ++residue) {
    const int64_t lines = chunk.lines + (grid.reach_rows - 1 - residue) / window.row_step;
    uint16_t* target = panel + residue * grid.residue_lines * line;
    for (int64_t k = 0; k < lines; ++k, target += line)
      copy_line(window.source, line_of(window.source, map, image, row0 + residue + k * window.row_step), column0, step,
                grid.line_pixels, pixel, target);
    end = target;
  }
  clear_elements(end, 2 * kLanes);
}

// Those of all images of the chunk.
inline void gather_grid(const PairWindow& window, const PairGrid& grid, const uint16_t* map, const PairChunk& chunk,
                        int64_t pixel, uint16_t* panel) {
  for (int64_t i = 0; i < chunk.images; ++i)
    gather_image(window, grid, map, chunk, chunk.image + i, pixel,
                 panel + i * grid.image_elements(window.row_step, pixel));
}

// Where in that panel a segment begins.
WNFUSED_INLINE int64_t segment_place(const PairWindow& window, const PairGrid& grid, const PairSegment& segment,
                                     int64_t pixel) {
  const int64_t line = segment.row % window.row_step * grid.residue_lines + segment.row / window.row_step;
  return line * grid.line_elements(pixel) + segment.column * pixel;
}

// The rows of a thin source: every segment's run of every pixel, from an image's lines that were gathered.
inline void gather_image_rows(const PairWindow& window, const PairGrid& grid, const uint16_t* lines,
                              const PairChunk& chunk, uint16_t* rows) {
  constexpr int64_t kCopied = 2 * kLanes;
  const int64_t channels = window.source.channels, run = grid.run * channels, line = grid.line_elements(channels);
  int64_t place[kMaxWindowTaps];
  for (int64_t s = 0; s < grid.segments; ++s)
    place[s] = segment_place(window, grid, window.segments[grid.first_segment + s], channels);
  // Whole vectors: what they write beyond a run is overwritten by the next one, or meets zeros in the bank. Where they
  // do not reach the end of a row, zeros do: not even weights of zero make nothing of an infinity that lay there.
  const bool ends_short = (grid.segments - 1) * run + round_up(run, kCopied) < grid.depth;
  for (int64_t l = 0; l < chunk.lines; ++l, lines += line)
    for (int64_t x = 0; x < chunk.columns; ++x, rows += grid.depth) {
      const uint16_t* source = lines + x * grid.panel_step * channels;
      uint16_t* target = rows;
      if (ends_short) clear_elements(rows + grid.depth - kCopied, kCopied);
      for (int64_t s = 0; s < grid.segments; ++s, target += run)
        for (int64_t k = 0; k < run; k += kCopied)
          __builtin_memcpy(target + k, source + place[s] + k, kCopied * sizeof(uint16_t));
    }
}

// Those of all images of the chunk. `lines`: room for one image's.
inline void gather_rows(const PairWindow& window, const PairGrid& grid, const uint16_t* map, const PairChunk& chunk,
                        uint16_t* lines, uint16_t* rows) {
  for (int64_t i = 0; i < chunk.images; ++i, rows += chunk.lines * chunk.columns * grid.depth) {
    gather_image(window, grid, map, chunk, chunk.image + i, window.source.channels, lines);
    gather_image_rows(window, grid, lines, chunk, rows);
  }
}

// Where row `row` of a scattered product begins in the panel; beyond the last one, anywhere in it.
WNFUSED_INLINE int64_t scattered_place(const PairWindow& window, const PairGrid& grid, const PairChunk& chunk,
                                       int64_t row) {
  const int64_t line = row / chunk.columns, image = line / chunk.lines;
  if (image >= chunk.images) return 0;
  return image * grid.image_elements(window.row_step, window.pixel) +
         (line - image * chunk.lines) * grid.line_elements(window.pixel) +
         (row - line * chunk.columns) * grid.panel_step * window.pixel;
}

// Where the rows of a product are in the target: lines of `rows` rows, the first `width` of which are pixels.
struct LineRows {
  int64_t first, line_step, step;  // pixels
  int64_t lines, rows, width;
};

// The sink of a window's products (pairs.h).
class WindowFinisher {
 public:
  static constexpr bool kFinishes = true;

  // `sums` has room for kTileSums floats.
  WindowFinisher(const PairWindow& window, const PairWindowEnding& ending, const LineRows& where, int64_t first_block,
                 float* sums)
      : window_(window), ending_(ending), where_(where), first_block_(first_block), sums_(sums) {}

  // What follows are products of the rows from `first_row` on.
  void begin(int64_t first_row) { first_row_ = first_row; }

  WNFUSED_INLINE TileSums place(int64_t, int64_t groups, int64_t, int64_t) const {
    return {sums_, groups * window_.tile_rows * kLanes};
  }

  WNFUSED_INLINE void meanwhile() const {}

  void ready(const TileSums& sums, int64_t group, int64_t groups, int64_t col, int64_t cols) {
    for (int64_t c = 0; c < cols; c += 2)
      finish_columns(sums.out + c * sums.block_stride, sums.block_stride, group, groups, first_block_ + col + c,
                     smaller(cols - c, 2));
  }

  // Not zero if a value was not finite.
  Block end() const { return poison_[0] + poison_[1]; }

 private:
  void finish_columns(const float* sums, int64_t block_stride, int64_t group, int64_t groups, int64_t block,
                      int64_t cols) {
    const int64_t row = first_row_ + group * window_.tile_rows;
    int64_t left = groups * window_.tile_rows, line = row / where_.rows, x = row - line * where_.rows;
    const bool whole = (block + cols) * kLanes <= window_.target.channels;
    while (left > 0 && line < where_.lines) {
      const bool in_map = x < where_.width;
      const int64_t run = smaller(left, (in_map ? where_.width : where_.rows) - x);
      if (in_map) {
        const int64_t pixel = where_.first + line * where_.line_step + x * where_.step;
        const int64_t at = pixel * window_.target.channels + block * kLanes;
        if (whole && cols == 2) finish_run<2>(at, run, sums, block_stride, block);
        else if (whole) finish_run<1>(at, run, sums, block_stride, block);
        else for (int64_t c = 0; c < cols; ++c) finish_part(at + c * kLanes, run, sums + c * block_stride, block + c);
      }
      sums += run * kLanes;
      left -= run;
      x += run;
      if (x == where_.rows) x = 0, ++line;
    }
  }

  WNFUSED_INLINE Block bias_of(int64_t block) const {
    return ending_.bias ? load(ending_.bias + block * kLanes) : zero();
  }

  template <int kCols>
  void finish_run(int64_t at, int64_t count, const float* sums, int64_t block_stride, int64_t block) {
    const int64_t step = where_.step * window_.target.channels;
    const Activation activation = ending_.activation;
    const float slope = ending_.slope;
    const uint16_t* residual = ending_.residual ? ending_.residual + at : nullptr;
    uint16_t* y = ending_.y + at;
    Block bias[kCols], poison[kCols];
    WNFUSED_UNROLL for (int c = 0; c < kCols; ++c) bias[c] = bias_of(block + c), poison[c] = poison_[c];
    for (int64_t i = 0; i < count; ++i, sums += kLanes) {
      Block value[kCols];
      WNFUSED_UNROLL for (int c = 0; c < kCols; ++c) {
        value[c] = load(sums + c * block_stride) + bias[c];
        if (residual) value[c] = value[c] + load(residual + i * step + c * kLanes);
        poison[c] = multiply_add(value[c], zero(), poison[c]);
        value[c] = activated(value[c], activation, slope);
      }
      if constexpr (kCols == 2) store_rounded(y + i * step, value[0], value[1]);
      else store_rounded(y + i * step, value[0]);
    }
    WNFUSED_UNROLL for (int c = 0; c < kCols; ++c) poison_[c] = poison[c];
  }

  // A block that may not be a whole one.
  void finish_part(int64_t at, int64_t count, const float* sums, int64_t block) {
    const int64_t channels = window_.target.channels, step = where_.step * channels;
    const int64_t lanes = smaller(channels - block * kLanes, kLanes);
    for (int64_t i = 0; i < count; ++i, sums += kLanes, at += step) {
      uint16_t entries[kLanes] = {};
      Block value = load(sums) + bias_of(block);
      if (ending_.residual) {
        for (int64_t k = 0; k < lanes; ++k) entries[k] = ending_.residual[at + k];
        value = value + load(entries);
      }
      poison_[0] = multiply_add(value, zero(), poison_[0]);
      store_rounded(entries, activated(value, ending_.activation, ending_.slope));
      for (int64_t k = 0; k < lanes; ++k) ending_.y[at + k] = entries[k];
    }
  }

  const PairWindow& window_;
  const PairWindowEnding& ending_;
  const LineRows where_;
  const int64_t first_block_;
  int64_t first_row_ = 0;
  float* sums_;
  Block poison_[2] = {zero(), zero()};
};

// Item `item` of a convolution. `scratch`: the panel, a thin source's lines, sums.
inline void pair_window_item(const PairWindow& window, int64_t item, const uint16_t* map, const float* bank,
                             const PairWindowEnding& ending, float* scratch, std::atomic<bool>& poisoned) {
  const auto [part, bundle] = window.conv_item(item);
  const PairGrid& grid = window.grid_of(part);
  const PairChunk chunk = window.conv_chunk(grid, part - grid.first_chunk);
  const int64_t first_block = bundle * window.conv_bundle_blocks;
  const int64_t blocks = smaller(window.conv_bundle_blocks, window.output_blocks - first_block);

  uint16_t* panel = reinterpret_cast<uint16_t*>(scratch);
  float* sums = scratch + window.sums_at();
  if (window.thin) {
    gather_rows(window, grid, map, chunk, reinterpret_cast<uint16_t*>(scratch + window.lines_at()), panel);
  } else {
    gather_grid(window, grid, map, chunk, window.pixel, panel);
  }

  const uint16_t* weights = reinterpret_cast<const uint16_t*>(bank) + first_block * window.block_elements + grid.bank;
  Segment segments[kMaxWindowTaps];
  const int64_t segment_count = window.thin ? smaller(grid.segments, 1) : grid.segments;
  for (int64_t s = 0; s < segment_count; ++s) {
    const int64_t place =
        window.thin ? 0 : segment_place(window, grid, window.segments[grid.first_segment + s], window.pixel);
    segments[s] = {panel + place, weights + s * grid.depth * kLanes};
  }
  const int64_t row_stride = window.thin ? grid.depth : grid.panel_step * window.pixel;
  PairProduct product{segments, segment_count, grid.depth, row_stride, window.block_elements};
  product.scattered = grid.scattered;
  const MapShape& target = window.target;
  const int64_t line0 = chunk.image * target.height + grid.row + chunk.line * window.target_row_step;
  const int64_t column0 = grid.column + chunk.column * window.target_column_step;
  const int64_t line_rows = window.thin || grid.scattered ? chunk.columns : grid.line_rows;
  const int64_t lines = chunk.images * chunk.lines;
  const LineRows where{line0 * target.width + column0, window.target_row_step * target.width, window.target_column_step,
                       lines, line_rows, chunk.columns};
  WindowFinisher finisher(window, ending, where, first_block, sums);

  // Lines that follow one another without whole tiles are one run of rows.
  const int64_t line_stride = window.thin ? chunk.columns * grid.depth : grid.line_elements(window.pixel);
  const bool run = grid.scattered || line_rows * row_stride == line_stride;
  const int64_t rows = run ? (lines - 1) * line_rows + chunk.columns : chunk.columns;
  int64_t offsets[kMaxGroups * kLanes], groups = 0, first_row = 0;
  const auto multiply = [&] {
    if (groups == 0) return;
    finisher.begin(first_row);
    Pairs::multiply(product, offsets, groups, blocks, finisher);
    first_row += groups * window.tile_rows;
    groups = 0;
  };
  for (int64_t l = 0; l < (run ? 1 : lines); ++l)
    for (int64_t row = 0; row < rows; row += window.tile_rows) {
      if (grid.scattered) {
        for (int64_t r = 0; r < window.tile_rows; ++r)
          offsets[groups * window.tile_rows + r] = scattered_place(window, grid, chunk, row + r);
        ++groups;
      } else {
        offsets[groups++] = l * line_stride + row * row_stride;
      }
      if (groups == kMaxGroups) multiply();
    }
  multiply();
  if (sum_of(finisher.end()) != 0.0f) poisoned.store(true, std::memory_order_relaxed);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

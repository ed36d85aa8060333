// A convolution over any window (window.h), by register tiles that read the map where it lies.
//
//   row r of a tile: the channels of source pixel r, moved by the tap    bank [tap][output block][channel][16 lanes]
//        broadcast channel k     x     vector k of the bank   ->   accumulator [r][output block]
//
// Floor: C taps multiply-adds a pixel and output.
#pragma once

#include "cpu/conv/layer_job.h"
#include "cpu/products/register_tiles.h"
#include "cpu/window/source.h"

namespace wnfused::cpu::WNFUSED_ISA {

// The units of a panel: where their channels lie in the source, before a tap's offset, and which pixels of the target
// they are. Rows up to a multiple of kRowMultiple repeat the first one.
struct Units {
  int64_t count;
  const float* source[kMaxPanelRows];
  int64_t target[kMaxPanelRows];
  int32_t level[kMaxPanelRows], row[kMaxPanelRows], column[kMaxPanelRows];  // in the source, unless it is pointwise
  Triple low, high;  // the least and the greatest of these
};

WNFUSED_INLINE Triple least(const Triple& a, const Triple& b) {
  return {smaller(a.level, b.level), smaller(a.row, b.row), smaller(a.column, b.column)};
}

WNFUSED_INLINE Triple greatest(const Triple& a, const Triple& b) {
  return {greater(a.level, b.level), greater(a.row, b.row), greater(a.column, b.column)};
}

// Units [t, t + count), which are neighbours in a line of the grid, from position `at` on: equal steps apart.
WNFUSED_INLINE void locate_line(const Window& window, const Grid& grid, const float* map, int64_t image,
                                const Triple& at, int64_t t, int64_t count, Units& units) {
  const Triple &step = window.source_step, &target_step = window.target_step;
  const Triple first{at.level * step.level, at.row * step.row, at.column * step.column};
  const float* source = map + (image * window.padded_pixels() + window.padded_offset(first)) * window.pixel;
  const int64_t level = grid.origin.level + at.level * target_step.level;
  const int64_t row = grid.origin.row + at.row * target_step.row;
  const int64_t target = (image * window.target.height + level * window.target_size.row + row) * window.target.width +
                         grid.origin.column + at.column * target_step.column;
  for (int64_t k = 0; k < count; ++k) {
    units.source[t + k] = source + k * step.column * window.pixel;
    units.target[t + k] = target + k * target_step.column;
    units.level[t + k] = static_cast<int32_t>(first.level);
    units.row[t + k] = static_cast<int32_t>(first.row);
    units.column[t + k] = static_cast<int32_t>(first.column + k * step.column);
  }
  units.low = least(units.low, first);
  units.high = greatest(units.high, {first.level, first.row, first.column + (count - 1) * step.column});
}

inline void locate_units(const Window& window, const Grid& grid, const float* map, int64_t first, int64_t count,
                         Units& units) {
  units.count = count;
  const Triple &step = window.source_step, &source_size = window.source_size, &size = grid.size;
  if (window.is_pointwise()) {
    for (int64_t t = 0; t < count; ++t) {
      units.source[t] = map + (first + t) * window.pixel;
      units.target[t] = first + t;
    }
    units.low = {0, 0, 0};
    units.high = {source_size.level - 1, source_size.row - 1, source_size.column - 1};
  } else {
    const int64_t images = window.target.images, positions = size.product();
    int64_t image = first / positions, position = first % positions;
    if (window.by_position) image = first % images, position = first / images;
    const int64_t line = position / size.column;
    Triple at{line / size.row, line % size.row, position % size.column};
    units.low = {at.level * step.level, at.row * step.row, at.column * step.column};
    units.high = units.low;
    const auto next_line = [&] {
      at.column = 0;
      if (++at.row < size.row) return true;
      at.row = 0;
      if (++at.level < size.level) return true;
      at.level = 0;
      return false;
    };
    for (int64_t t = 0; t < count;) {
      const int64_t run = window.by_position ? 1 : smaller(size.column - at.column, count - t);
      locate_line(window, grid, map, image, at, t, run, units);
      t += run;
      if (window.by_position) {
        if (++image < images) continue;
        image = 0;
        if (++at.column == size.column) next_line();
      } else if ((at.column += run) == size.column && !next_line()) {
        ++image;
      }
    }
    for (int64_t t = count; t < round_up_rows(count); ++t) {
      units.level[t] = units.level[0];
      units.row[t] = units.row[0];
      units.column[t] = units.column[0];
    }
  }
  for (int64_t t = count; t < round_up_rows(count); ++t) units.source[t] = units.source[0];
}

// Whether some unit may meet a pixel of the map there, not only what is beyond it.
WNFUSED_INLINE bool touches(const Window& window, const Units& units, const Tap& tap) {
  const Triple &low = units.low, &high = units.high, &size = window.source_size;
  return high.level + tap.level >= 0 && low.level + tap.level < size.level && high.row + tap.row >= 0 &&
         low.row + tap.row < size.row && high.column + tap.column + window.tap_columns > 0 &&
         low.column + tap.column < size.column;
}

// Whether every unit meets a pixel of the map there. A border, where the source has one, is part of the map.
WNFUSED_INLINE bool all_meet(const Window& window, const Units& units, const Tap& tap) {
  const Triple &low = units.low, &high = units.high, &size = window.source_size;
  return window.has_border() ||
         (low.level + tap.level >= 0 && high.level + tap.level < size.level && low.row + tap.row >= 0 &&
          high.row + tap.row < size.row && low.column + tap.column >= 0 && high.column + tap.column < size.column);
}

// Which units meet a pixel of the map at a tap, asked one by one. 32 bits hold every place in a map that is small
// enough for these kernels (choice/methods.cpp).
class Meeting {
 public:
  Meeting(const Window& window, const Units& units, const Tap& tap)
      : units_(units), level_(static_cast<int32_t>(tap.level)), row_(static_cast<int32_t>(tap.row)),
        column_(static_cast<int32_t>(tap.column)), levels_(static_cast<uint32_t>(window.source_size.level)),
        rows_(static_cast<uint32_t>(window.source_size.row)),
        columns_(static_cast<uint32_t>(window.source_size.column)) {}

  WNFUSED_INLINE bool is_inside(int64_t t) const {
    return (static_cast<uint32_t>(units_.level[t] + level_) < levels_) &
           (static_cast<uint32_t>(units_.row[t] + row_) < rows_) &
           (static_cast<uint32_t>(units_.column[t] + column_) < columns_);
  }

 private:
  const Units& units_;
  int32_t level_, row_, column_;
  uint32_t levels_, rows_, columns_;
};

// Where the channels lie that a panel's rows meet at a tap, so many floats from a pointer each, and a bit for every row
// that meets a pixel there.
struct TapRows {
  const float* const* rows;
  int64_t offset;
  uint64_t met;
};

// Rows beyond the map have zeros. `places`: memory for pointers.
WNFUSED_INLINE TapRows tap_rows(const Window& window, const Units& units, const Tap& tap, const float* zeros,
                                const float** places) {
  static_assert(kMaxPanelRows <= 64);
  const int64_t offset = window.tap_offset(tap) * window.pixel;
  if (all_meet(window, units, tap)) return {units.source, offset, ~uint64_t{0}};
  const Meeting meeting(window, units, tap);
  const int64_t rows = round_up_rows(units.count);
  for (int64_t t = 0; t < rows; ++t) places[t] = meeting.is_inside(t) ? units.source[t] + offset : zeros;
  uint64_t met = 0;
  for (int64_t t = 0; t < rows; ++t) met |= static_cast<uint64_t>(places[t] != zeros) << t;
  return {places, 0, met};
}

// A tap that a panel meets, and its plane of the bank.
struct Met {
  TapRows at;
  const float* bank;
};

// What becomes of the sums of a panel: of row t and block b, where they go and what is added to them, 16 b floats from
// there. Rows that only fill a tile write to memory that nobody reads.
struct PanelEnd {
  float* target[kMaxPanelRows];
  const float* added[kMaxPanelRows];  // the first null: nothing is added
  const float* bias;                  // or null
  Activation activation;
  float slope;
  int64_t channels;  // from the first block's on, that there is room for
  int64_t next;  // from a block's outputs to those of the panel's next two, or of the next panel's first; 0: not known
  Block poison;  // 0 while everything is finite, before its activation
};

// Row `row` and block `block` are the tile's first. An infinity stays one, whatever the activation, as torch's does.
template <int Rows, int Cols>
WNFUSED_INLINE void finish_tile(PanelEnd& end, int64_t row, int64_t block, Block (&sum)[Rows][Cols]) {
  const int64_t channel = block * kLanes;
  if (end.bias) {
    WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) {
      const Block bias = load(end.bias + channel + c * kLanes);
      WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) sum[r][c] = sum[r][c] + bias;
    }
  }
  if (end.added[0]) {
    WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) {
      const float* added = end.added[row + r] + channel;
      WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) sum[r][c] = load(added + c * kLanes) + sum[r][c];
    }
  }
  Block poison = end.poison;
  WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) {
    WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) poison = multiply_add(sum[r][c], zero(), poison);
  }
  end.poison = poison;
  if (end.activation == Activation::kRelu) {
    WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) {
      WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) sum[r][c] = relu(sum[r][c]);
    }
  } else if (end.activation == Activation::kLeakyRelu) {
    const Block slope = splat(end.slope);
    WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) {
      WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) sum[r][c] = leaky_mask(sum[r][c], sum[r][c], slope);
    }
  }
  if (channel + Cols * kLanes <= end.channels) {
    WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) {
      float* target = end.target[row + r] + channel;
      WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) store(target + c * kLanes, sum[r][c]);
    }
  } else {
    WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) {
      WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) {
        float* target = end.target[row + r] + channel + c * kLanes;
        const int64_t left = end.channels - channel - c * kLanes;
        if (left >= kLanes) store(target, sum[r][c]);
        else if (left > 0) store(target, sum[r][c], left);
      }
    }
  }
}

// What a panel multiplies: the taps it meets, `channels` of the source from `first_channel` on, and the bank from
// `bank_offset` on, `col_stride` floats from one block to the next.
struct PanelProducts {
  const Met* taps;
  int64_t tap_count, first_channel, channels, bank_offset, col_stride;
  int64_t ahead;  // from a row's channels to those that a tile soon after reads for the first time; 0: none does
};

// Channel k of a tile's rows by its weights.
template <int Rows, int Cols, class B>
WNFUSED_INLINE void add_channel(const float* const (&at)[Rows], int64_t k, const float* weights, int64_t col_stride,
                                B (&sum)[Rows][Cols]) {
  B weight[Cols];
  WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) weight[c] = load_as<B>(weights + c * col_stride);
  WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) {
    const Native value = native_splat(at[r][k]);
    WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) sum[r][c] = multiply_add(value, weight[c], sum[r][c]);
  }
}

// B: Block, or HalfBlock of a last block of which half is empty. A row has two sums of halves then, for every other
// channel of the source, as so few registers would wait for each other.
template <int Rows, int Cols, class B>
inline void window_tile(const PanelProducts& panel, int64_t row, int64_t block, PanelEnd& end) {
  if (end.next) {
    WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) {
      const float* next = end.target[row + r] + (block * kLanes + end.next);
      WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) prefetch_for_writing(next + c * kLanes);
    }
  }
  constexpr int kSums = std::is_same_v<B, Block> ? 1 : 2;
  B sum[kSums][Rows][Cols] = {};
  constexpr uint64_t kTile = (uint64_t{1} << Rows) - 1;
  for (int64_t p = 0; p < panel.tap_count; ++p) {
    const TapRows& tap = panel.taps[p].at;
    if ((tap.met >> row & kTile) == 0) continue;
    const float* at[Rows];
    WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) at[r] = tap.rows[row + r] + (tap.offset + panel.first_channel);
    const float* weights = panel.taps[p].bank + panel.bank_offset;
    const int64_t run = panel.ahead ? kLanes : panel.channels;  // of channels, a line of memory
    for (int64_t first = 0; first < panel.channels; first += run) {
      if (panel.ahead) {
        WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) __builtin_prefetch(at[r] + (first + panel.ahead));
      }
      const int64_t last = smaller(first + run, panel.channels);
      const int64_t even = kSums == 1 ? last : last - (last - first) % kSums;
      _Pragma("GCC unroll 4") for (int64_t k = first; k < even; k += kSums, weights += kSums * kLanes) {
        WNFUSED_UNROLL for (int s = 0; s < kSums; ++s)
          add_channel(at, k + s, weights + s * kLanes, panel.col_stride, sum[s]);
      }
      if (kSums > 1 && even < last) {
        add_channel(at, even, weights, panel.col_stride, sum[0]);
        weights += kLanes;
      }
    }
  }
  if constexpr (kSums == 1) {
    finish_tile(end, row, block, sum[0]);
  } else {
    Block whole[Rows][Cols];
    WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) {
      WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) whole[r][c] = whole_of(sum[0][r][c], sum[1][r][c]);
    }
    finish_tile(end, row, block, whole);
  }
}

// Whether, of so many output blocks, the first two can share a tile: they sum over the same channels.
WNFUSED_INLINE bool takes_pair(const Window& window, int64_t output_block, int64_t blocks) {
  return blocks >= 2 && output_block % window.group_blocks + 2 <= window.group_blocks;
}

// A pointer to each row wants a register, so there are no taller ones than these.
template <int Cols, class B>
inline void window_columns(const PanelProducts& panel, int64_t count, int64_t block, PanelEnd& end) {
  const int64_t rows = round_up_rows(count);
  int64_t r = for_tall_tiles(rows, [&](auto tall, int64_t row) __attribute__((always_inline)) {
    window_tile<tall.value, Cols, B>(panel, row, block, end);
  });
  for (; r + kPairRows <= rows; r += kPairRows) window_tile<kPairRows, Cols, B>(panel, r, block, end);
  for (; r < rows; r += kRowMultiple) window_tile<kRowMultiple, Cols, B>(panel, r, block, end);
}

// Calls use(run, row) for the pieces of `count` pixels from number `first` on that lie in one image each; `row` counts
// from `first`.
template <class Use>
WNFUSED_INLINE void for_images(const MapShape& shape, int64_t first, int64_t count, const Use& use) {
  const int64_t pixels = shape.height * shape.width;
  for (int64_t row = 0; row < count;) {
    const int64_t image = (first + row) / pixels, begin = (first + row) % pixels;
    const int64_t end = smaller(pixels, begin + count - row);
    use(PixelRun{image, begin, end}, row);
    row += end - begin;
  }
}

// Where a panel's outputs go. `scratch`: of the panel's rows and blocks, what is written and what is added, if those
// are not where they are, and a row that is not read.
inline void aim_panel(const Window& window, const LayerMaps& maps, const Units& units, int64_t first_block,
                      int64_t blocks, float* scratch, PanelEnd& end) {
  const int64_t channels = blocks * kLanes, rows = window.conv_rows, pixel = window.target_pixel;
  float *values = scratch, *added = values + rows * channels, *unread = added + rows * channels;
  const bool residual = maps.residual.given.data != nullptr;
  end = {};
  end.bias = maps.bias ? maps.bias + first_block * kLanes : nullptr;
  end.activation = maps.activation;
  end.slope = maps.slope;
  end.poison = zero();
  end.channels = maps.target.own ? pixel - first_block * kLanes : channels;
  if (maps.target.own) {
    for (int64_t t = 0; t < units.count; ++t) {
      const int64_t at = units.target[t] * pixel + first_block * kLanes;
      end.target[t] = maps.target.own + at;
      if (residual) end.added[t] = maps.residual.own + at;
    }
  } else {
    if (residual)
      for_images(window.target, units.target[0], units.count, [&](const PixelRun& run, int64_t row) {
        read_pixels(some_blocks(window.target, first_block, blocks), some_blocks(maps.residual.given, first_block), run,
                    added + row * channels);
      });
    for (int64_t t = 0; t < units.count; ++t) {
      end.target[t] = values + t * channels;
      if (residual) end.added[t] = added + t * channels;
    }
  }
  for (int64_t t = units.count; t < round_up_rows(units.count); ++t) {
    end.target[t] = unread;
    end.added[t] = end.added[0];
  }
}

// Item `item`: one chunk of a grid's units, one bundle of output blocks. Maps in another layout than the kernels'
// (`given` in place of `own`) are converted panel by panel, where the units are pixels in order.
inline void window_item(const Window& window, int64_t item, const LayerMaps& maps, const float* zeros,
                        const float* bank, float* scratch, std::atomic<bool>& poisoned) {
  const auto [chunk, bundle] = window.conv_item(item);
  int64_t index = window.grid_count - 1;
  while (window.grids[index].first_chunk > chunk) --index;
  const Grid& grid = window.grids[index];
  const int64_t first = (chunk - grid.first_chunk) * window.conv_rows, first_block = bundle * window.conv_bundle_blocks;
  const int64_t blocks = smaller(window.conv_bundle_blocks, window.output_blocks - first_block);
  const int64_t channels = window.pixel;
  float *panel = scratch, *values = panel + window.conv_rows * channels;
  Units units;
  const float* source = maps.source.own ? maps.source.own : panel;
  locate_units(window, grid, source, first, smaller(window.conv_rows, window.units(grid) - first), units);
  if (source == panel) {
    for_images(window.source, first, units.count, [&](const PixelRun& run, int64_t row) {
      read_pixels(window.source, maps.source.given, run, panel + row * channels);
    });
    for (int64_t t = 0; t < round_up_rows(units.count); ++t)
      units.source[t] = panel + smaller(t, units.count - 1) * channels;
  }
  Met met[kMaxWindowTaps];
  const float* places[kMaxWindowTaps][kMaxPanelRows];
  int64_t count = 0;
  for (int64_t k = 0; k < grid.taps; ++k) {
    const Tap& tap = window.taps[grid.first_tap + k];
    if (!touches(window, units, tap)) continue;
    met[count] = {tap_rows(window, units, tap, zeros, places[count]), bank + tap.plane * window.plane_stride};
    ++count;
  }
  PanelEnd end;
  aim_panel(window, maps, units, first_block, blocks, values, end);
  // A tensor that was just allocated is in no cache.
  const bool fresh = maps.target.is_in_place() && window.is_run();
  const int64_t rows_ahead = maps.source.is_in_place() && window.is_pointwise() ? 2 * kPairRows * channels : 0;
  for (int64_t b = 0; b < blocks;) {
    const int64_t block = first_block + b;
    const bool pair = kCols == 2 && takes_pair(window, block, blocks - b);
    const bool half = kParts > 1 && window.target.channels - block * kLanes <= kLanes / 2;
    const auto run = pair   ? window_columns<kCols, Block>
                     : half ? window_columns<1, HalfBlock>
                            : window_columns<1, Block>;
    end.next = 0;
    if (fresh) end.next = b + kCols < blocks ? kCols * kLanes : window.conv_rows * window.target_pixel - b * kLanes;
    const int64_t channel = window.first_channel(block), next = b + (pair ? kCols : 1);
    int64_t ahead = b == 0 ? rows_ahead : 0;
    // Another group's channels: lines of the same pixels, which no processor takes for a stream.
    if (next < blocks && window.first_channel(first_block + next) != channel)
      ahead = window.first_channel(first_block + next) - channel;
    run({met, count, channel, window.depth, block * window.block_floats(), window.block_floats(), ahead}, units.count,
        b, end);
    b = next;
  }
  if (!maps.target.own)
    for_images(window.target, units.target[0], units.count, [&](const PixelRun& run, int64_t row) {
      write_pixels(some_blocks(window.target, first_block, blocks), values + row * blocks * kLanes, run,
                   some_blocks(maps.target.given, first_block));
    });
  if (sum_of(end.poison) != 0.0f) poisoned.store(true, std::memory_order_relaxed);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

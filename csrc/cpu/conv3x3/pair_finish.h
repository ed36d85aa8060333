// How a convolution on pairs of bfloat16 ends: register tile by register tile, while the sums are near.
#pragma once

#include "cpu/conv/epilogue.h"
#include "cpu/products/pairs.h"
#include "cpu/vec/prefetch.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Which pixels the rows of a product are: lines of `rows` rows, the first `width` of which are in the map, `count` of them
// in all. The first one is pixel `first`, and `step` pixels lie from one to the next.
struct RowPixels {
  int64_t first, step, rows, width, count;
};

// A walk through rows of a product that leaves out those that are no pixel: `count` rows from place `x` of a line on, whose
// first `width` are in the map, with a gap of so many floats behind them.
struct RowWalk {
  int64_t count, x, width, gap;
};

// What is not finite: 0 times the values, summed up; and the largest of runs, without their signs.
struct Poison {
  Block sum, largest;
};

// kCols blocks side by side of the rows of a walk, which lie `step` elements apart, from element `at` of the maps on.
// Of two blocks `poison` gathers rounded values: an overflow of the rounding counts, too.
template <Ending kEnding, int kCols>
WNFUSED_INLINE void finish_walk(const ConvEpilogue<uint16_t>& epilogue, int64_t at, int64_t step, RowWalk walk,
                                const TileSums& sums, const Block (&bias)[2], Poison& gathered_poison) {
  // Copies of its own: the compiler could keep none of these in registers across the stores to maps.
  const Block factor = splat(epilogue.factor);
  Poison poison = gathered_poison;
  const float* source = sums.out;
  // An ending has some of these, null where it has not.
  [[maybe_unused]] const uint16_t* mask = kEnding == Ending::kMask ? epilogue.mask + at : nullptr;
  [[maybe_unused]] const float* other = is_operand(kEnding) ? nullptr : epilogue.other + at;
  [[maybe_unused]] float* out = is_operand(kEnding) ? nullptr : epilogue.out + at;
  uint16_t* operand = epilogue.operand + at;
  at = 0;
  for (; walk.count > 0; --walk.count, source += kLanes, at += step) {
    if (walk.x == walk.width) walk.x = 0, source += walk.gap;
    ++walk.x;
    Block value[kCols];
    WNFUSED_UNROLL for (int c = 0; c < kCols; ++c) {
      Block beside = zero();
      if constexpr (kEnding == Ending::kMask && kCols == 1) beside = load(mask + at);
      else if constexpr (!is_operand(kEnding)) beside = load(other + at + c * kLanes);
      const Block sum = load(source + c * sums.block_stride);
      if constexpr (kEnding == Ending::kMask && kCols == 2) value[c] = sum;
      else value[c] = ended<kEnding>(sum, bias[c], beside, factor);
      if constexpr (!is_operand(kEnding)) store(out + at + c * kLanes, value[c]);
    }
    if constexpr (kCols == 2) {
      Block run = rounded_run(value[0], value[1]);
      if constexpr (kEnding == Ending::kMask) run = mask_run(load_bits(mask + at), run);
      else poison.largest = largest_run(poison.largest, run);
      if constexpr (kEnding == Ending::kRelu) run = relu_run(run);
      store_bits(operand + at, run);
    } else {
      if constexpr (kEnding != Ending::kMask) poison.sum = multiply_add(value[0], zero(), poison.sum);
      if constexpr (kEnding == Ending::kRelu) value[0] = relu(value[0]);
      store_rounded(operand + at, value[0]);
    }
  }
  gathered_poison = poison;
}

// The sink of a convolution's products (pairs.h).
template <Ending kEnding>
class Finisher {
 public:
  static constexpr bool kFinishes = true;

  // `sums` has room for kTileSums floats; `ahead` lives as long as this.
  Finisher(const Geometry& geometry, const ConvEpilogue<uint16_t>& epilogue, Ahead& ahead, int64_t first_block,
           float* sums)
      : geometry_(geometry),
        epilogue_(epilogue),
        full_(geometry.channels == geometry.padded_channels && !epilogue.saved.data),
        fetches_sums_(full_ && Pairs::kTile.is_matrix && geometry.channel_blocks <= kFewBlocks),
        fetches_operand_(fetches_sums_ || (full_ && Pairs::kTile.is_matrix && epilogue.fresh)),
        first_block_(first_block),
        sums_(sums),
        fetch_(ahead) {
    if (!Pairs::kTile.is_matrix) fetch_.finish();
  }

  // What follows are products of so many groups of rows, from `first_row` on.
  void begin(const RowPixels& pixels, int64_t first_row, int64_t groups) {
    pixels_ = pixels;
    // Lines without a gap are one.
    if (pixels.rows == pixels.width) pixels_.rows = pixels_.width = pixels.count;
    const int64_t rows = pixels_.rows, width = pixels_.width, line = first_row / rows;
    int64_t x = first_row - line * rows, before = line * width;  // of the line
    for (int64_t g = 0; g <= groups; ++g, x += geometry_.pair_rows) {
      while (x >= rows) x -= rows, before += width;
      places_[g] = {x, smaller(before + smaller(x, width), pixels_.count)};
    }
  }

  TileSums place(int64_t group, int64_t groups, int64_t col, int64_t cols) {
    if (fetches_operand_) {
      const int64_t begin = places_[group].inside, end = places_[group + groups].inside;
      target_ = {(pixels_.first + begin * pixels_.step) * geometry_.channel_blocks + block_of(col), cols, end - begin};
    }
    return {sums_, groups * geometry_.pair_rows * kLanes};
  }

  WNFUSED_INLINE void meanwhile() {
    fetch_.step();
    fetch_target();
  }

  void ready(const TileSums& sums, int64_t group, int64_t groups, int64_t col, int64_t cols) {
    for (int64_t c = 0; c < cols; c += 2)
      finish_columns({sums.out + c * sums.block_stride, sums.block_stride}, group, groups, col + c, smaller(cols - c, 2));
  }

  // Whether a value was not finite.
  bool end() {
    fetch_.finish();
    return sum_of(poison_.sum) != 0.0f || any_beyond_finite(poison_.largest);
  }

 private:
  // Up to so many blocks of outputs, what the epilogue reads and writes is fetched while the products are summed. Of more of
  // them the bank needs the first-level cache itself, and only what no cache holds is fetched.
  static constexpr int64_t kFewBlocks = 3;

  // Where a row is: in its line, and how many pixels of the map lie before it.
  struct RowPlace {
    int64_t x, inside;
  };

  // `row_pixels` output blocks of the product are one of the map, for neighbouring pixels.
  int64_t block_of(int64_t col) const { return first_block_ + col / geometry_.row_pixels; }

  // Lines that a store would wait for otherwise, and with it all stores behind it, those of the next panel among them,
  // which tiles in turn wait for.
  WNFUSED_INLINE void fetch_target() {
    constexpr int64_t kRows = 4, kLine = 2;  // blocks of an operand's line
    const int64_t step = pixels_.step * geometry_.channel_blocks;
    for (int64_t i = 0; i < kRows && target_.rows > 0; ++i, --target_.rows, target_.block += step) {
      const int64_t at = target_.block * kLanes;
      for (int64_t c = 0; !is_operand(kEnding) && fetches_sums_ && c < target_.cols; ++c)
        prefetch_for_writing(epilogue_.out + at + c * kLanes);
      if (fetches_sums_ || target_.block % kLine == 0) prefetch_for_writing(epilogue_.operand + at);
    }
  }

  // One or two.
  void finish_columns(TileSums sums, int64_t group, int64_t groups, int64_t col, int64_t cols) {
    const int64_t block = block_of(col);
    Block bias[2] = {zero(), zero()};
    for (int64_t c = 0; epilogue_.bias && c < cols; ++c)
      bias[c] = load(epilogue_.bias + (block + (geometry_.row_pixels == 1 ? c : 0)) * kLanes);
    const RowPlace begin = places_[group];
    RowWalk walk{places_[group + groups].inside - begin.inside, begin.x, pixels_.width,
                 (pixels_.rows - pixels_.width) * kLanes};
    if (begin.x > walk.width) {  // in the gap
      sums.out += (pixels_.rows - begin.x) * kLanes;
      walk.x = 0;
    }
    const int64_t pixel = pixels_.first + begin.inside * pixels_.step;
    if (!full_) return finish_part(block, pixel, cols, walk, sums, bias);
    const int64_t blocks = geometry_.channel_blocks;
    const int64_t at = (pixel * blocks + block) * kLanes, step = pixels_.step * blocks * kLanes;
    if (cols == 2) finish_walk<kEnding, 2>(epilogue_, at, step, walk, sums, bias, poison_);
    else finish_walk<kEnding, 1>(epilogue_, at, step, walk, sums, bias, poison_);
  }

  // Of a map whose last block is not a whole one, or that is saved as a copy.
  void finish_part(int64_t block, int64_t pixel, int64_t cols, RowWalk walk, TileSums sums, const Block (&bias)[2]) {
    const bool next_pixel = geometry_.row_pixels == 2;
    for (; walk.count > 0; --walk.count, sums.out += kLanes, pixel += pixels_.step) {
      if (walk.x == walk.width) walk.x = 0, sums.out += walk.gap;
      ++walk.x;
      for (int64_t c = 0; c < cols; ++c)
        finish_pixel<kEnding>(geometry_, epilogue_, pixel + (next_pixel ? c : 0), block + (next_pixel ? 0 : c),
                              load(sums.out + c * sums.block_stride), bias[c], poison_.sum);
    }
  }

  const Geometry& geometry_;
  const ConvEpilogue<uint16_t> epilogue_;
  const bool full_, fetches_sums_, fetches_operand_;
  const int64_t first_block_;
  float* const sums_;
  FetchBySteps fetch_;
  RowPixels pixels_{};
  RowPlace places_[kMaxGroups + 1];  // of each group's first row, and of the row behind the last one
  // Blocks of the map that are still to be fetched: the first one of a row, how many side by side, and rows.
  struct {
    int64_t block, cols, rows;
  } target_{};
  Poison poison_{zero(), zero()};
};

}  // namespace wnfused::cpu::WNFUSED_ISA

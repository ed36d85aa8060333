// How a convolution on pairs of bfloat16 ends: register tile by register tile, while the sums are near.
#pragma once

#include "cpu/conv/epilogue.h"
#include "cpu/products/pairs.h"
#include "cpu/vec/prefetch.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Which pixels the rows of a product are: lines of `rows` rows, the first `width` of which are in the map, `count` of
// them in all. The first one is pixel `first`, and `step` pixels lie from one to the next. In the operand's map, which
// may have a border, it is pixel `operand`, and lines lie `operand_line` pixels apart.
struct RowPixels {
  int64_t first, step, rows, width, count, operand, operand_line;

  int64_t operand_gap() const { return operand_line - width * step; }
};

// A walk through rows of a product that leaves out those that are no pixel: `count` rows from place `x` of a line on,
// whose first `width` are in the map, with gaps of so many floats of sums and of so many elements of operands behind
// them.
struct RowWalk {
  int64_t count, x, width, gap, operand_gap;
};

// What is not finite: 0 times the values, summed up; and the largest of runs, without their signs.
struct Poison {
  Block sum, largest;
};

// kCols blocks side by side of the rows of a walk, which lie `step` elements apart, from element `at` of the maps on,
// element `operand_at` of the operand's. Of two blocks `poison` gathers rounded values: an overflow of the rounding
// counts, too.
template <Ending kEnding, int kCols>
WNFUSED_INLINE void finish_walk(const ConvEpilogue<uint16_t>& epilogue, int64_t at, int64_t operand_at, int64_t step,
                                RowWalk walk, const TileSums& sums, const Block (&bias)[2], Poison& gathered_poison) {
  // Copies of its own: the compiler could keep none of these in registers across the stores to maps.
  const Block factor = splat(epilogue.factor);
  Poison poison = gathered_poison;
  const float* source = sums.out;
  // An ending has some of these, null where it has not.
  [[maybe_unused]] const uint16_t* mask = kEnding == Ending::kMask ? epilogue.mask + at : nullptr;
  [[maybe_unused]] const float* other = is_operand(kEnding) ? nullptr : epilogue.other + at;
  [[maybe_unused]] float* out = is_operand(kEnding) ? nullptr : epilogue.out + at;
  uint16_t* operand = epilogue.operand + operand_at;
  at = 0;
  for (; walk.count > 0; --walk.count, source += kLanes, at += step, operand += step) {
    if (walk.x == walk.width) walk.x = 0, source += walk.gap, operand += walk.operand_gap;
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
      store_bits(operand, run);
    } else {
      if constexpr (kEnding != Ending::kMask) poison.sum = multiply_add(value[0], zero(), poison.sum);
      if constexpr (kEnding == Ending::kRelu) value[0] = relu(value[0]);
      store_rounded(operand, value[0]);
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
    if (pixels.rows == pixels.width && pixels.operand_gap() == 0) {
      pixels_.rows = pixels_.width = pixels.count;
      pixels_.operand_line = pixels.count * pixels.step;
    }
    const int64_t rows = pixels_.rows, width = pixels_.width, line = first_row / rows;
    const int64_t step = pixels.step, operand_line = pixels_.operand_line;
    int64_t x = first_row - line * rows, before = line * width, operand = pixels.operand + line * operand_line;
    for (int64_t g = 0; g <= groups; ++g, x += geometry_.pair_rows) {
      while (x >= rows) x -= rows, before += width, operand += operand_line;
      const int64_t inside = smaller(x, width);
      places_[g] = {x, smaller(before + inside, pixels_.count), operand + inside * step};
    }
  }

  TileSums place(int64_t group, int64_t groups, int64_t col, int64_t cols) {
    if (fetches_operand_) {
      const RowPlace& begin = places_[group];
      const int64_t blocks = geometry_.channel_blocks, block = block_of(col);
      target_ = {(pixels_.first + begin.inside * pixels_.step) * blocks + block, begin.operand * blocks + block, cols,
                 places_[group + groups].inside - begin.inside, smaller(begin.x, pixels_.width)};
    }
    return {sums_, groups * geometry_.pair_rows * kLanes};
  }

  WNFUSED_INLINE void meanwhile() {
    fetch_.step();
    fetch_target();
  }

  void ready(const TileSums& sums, int64_t group, int64_t groups, int64_t col, int64_t cols) {
    for (int64_t c = 0; c < cols; c += 2)
      finish_columns({sums.out + c * sums.block_stride, sums.block_stride}, group, groups, col + c,
                     smaller(cols - c, 2));
  }

  // Whether a value was not finite.
  bool end() {
    fetch_.finish();
    return sum_of(poison_.sum) != 0.0f || any_beyond_finite(poison_.largest);
  }

 private:
  // Up to so many blocks of outputs, what the epilogue reads and writes is fetched while the products are summed. Of
  // more of them the bank needs the first-level cache itself, and only what no cache holds is fetched.
  static constexpr int64_t kFewBlocks = 3;

  // Where a row is: in its line, and how many pixels of the map lie before it; and its pixel of the operand's map, in a
  // gap that behind the line.
  struct RowPlace {
    int64_t x, inside, operand;
  };

  // `row_pixels` output blocks of the product are one of the map, for neighbouring pixels.
  int64_t block_of(int64_t col) const { return first_block_ + col / geometry_.row_pixels; }

  // Lines that a store would wait for otherwise, and with it all stores behind it, those of the next panel among them,
  // which tiles in turn wait for.
  WNFUSED_INLINE void fetch_target() {
    constexpr int64_t kRows = 4, kLine = 2;  // blocks of an operand's line
    const int64_t step = pixels_.step * geometry_.channel_blocks;
    for (int64_t i = 0; i < kRows && target_.rows > 0; ++i, --target_.rows) {
      if (target_.x == pixels_.width)
        target_.x = 0, target_.operand += pixels_.operand_gap() * geometry_.channel_blocks;
      for (int64_t c = 0; !is_operand(kEnding) && fetches_sums_ && c < target_.cols; ++c)
        prefetch_for_writing(epilogue_.out + (target_.block + c) * kLanes);
      if (fetches_sums_ || target_.operand % kLine == 0)
        prefetch_for_writing(epilogue_.operand + target_.operand * kLanes);
      ++target_.x;
      target_.block += step;
      target_.operand += step;
    }
  }

  // One or two.
  void finish_columns(TileSums sums, int64_t group, int64_t groups, int64_t col, int64_t cols) {
    const int64_t block = block_of(col);
    Block bias[2] = {zero(), zero()};
    for (int64_t c = 0; epilogue_.bias && c < cols; ++c)
      bias[c] = load(epilogue_.bias + (block + (geometry_.row_pixels == 1 ? c : 0)) * kLanes);
    const RowPlace begin = places_[group];
    const int64_t blocks = geometry_.channel_blocks;
    RowWalk walk{places_[group + groups].inside - begin.inside, smaller(begin.x, pixels_.width), pixels_.width,
                 (pixels_.rows - pixels_.width) * kLanes, pixels_.operand_gap() * blocks * kLanes};
    sums.out -= (begin.x - walk.x) * kLanes;  // a walk that begins in a gap passes it as a whole
    const int64_t pixel = pixels_.first + begin.inside * pixels_.step;
    if (!full_) return finish_part(block, pixel, cols, walk, sums, bias);
    const int64_t at = (pixel * blocks + block) * kLanes, step = pixels_.step * blocks * kLanes;
    const int64_t operand_at = (begin.operand * blocks + block) * kLanes;
    if (cols == 2) finish_walk<kEnding, 2>(epilogue_, at, operand_at, step, walk, sums, bias, poison_);
    else finish_walk<kEnding, 1>(epilogue_, at, operand_at, step, walk, sums, bias, poison_);
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
  // Blocks of the maps that are still to be fetched: the first ones of a row, how many side by side; rows, and the next
  // one's place in its line.
  struct {
    int64_t block, operand, cols, rows, x;
  } target_{};
  Poison poison_{zero(), zero()};
};

}  // namespace wnfused::cpu::WNFUSED_ISA

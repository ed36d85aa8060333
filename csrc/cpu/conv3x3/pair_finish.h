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

// kCols blocks side by side of `count` rows that lie `step` elements apart, from element `first` of the maps on.
template <Ending kEnding, int kCols>
WNFUSED_INLINE void finish_run(const ConvEpilogue<uint16_t>& epilogue, int64_t first, int64_t step, int64_t count,
                               const TileSums& sums, const Block (&bias)[2], Block (&gathered_poison)[2]) {
  // Copies of its own: the compiler could keep none of these in registers across the stores to maps.
  const Block factor = splat(epilogue.factor);
  Block poison[kCols];
  WNFUSED_UNROLL for (int c = 0; c < kCols; ++c) poison[c] = gathered_poison[c];
  const float* source = sums.out;
  // An ending has some of these, null where it has not.
  [[maybe_unused]] const uint16_t* mask = kEnding == Ending::kMask ? epilogue.mask + first : nullptr;
  [[maybe_unused]] const float* other = is_operand(kEnding) ? nullptr : epilogue.other + first;
  [[maybe_unused]] float* out = is_operand(kEnding) ? nullptr : epilogue.out + first;
  uint16_t* operand = epilogue.operand + first;
  for (int64_t at = 0; count > 0; --count, source += kLanes, at += step) {
    Block value[kCols];
    WNFUSED_UNROLL for (int c = 0; c < kCols; ++c) {
      Block beside = zero();
      if constexpr (kEnding == Ending::kMask) beside = load(mask + at + c * kLanes);
      else if constexpr (!is_operand(kEnding)) beside = load(other + at + c * kLanes);
      value[c] = ended<kEnding>(load(source + c * sums.block_stride), bias[c], beside, factor);
      if constexpr (kEnding != Ending::kMask) poison[c] = multiply_add(value[c], zero(), poison[c]);
      if constexpr (kEnding == Ending::kRelu) value[c] = relu(value[c]);
      if constexpr (!is_operand(kEnding)) store(out + at + c * kLanes, value[c]);
    }
    if constexpr (kCols == 2) store_rounded(operand + at, value[0], value[1]);
    else store_rounded(operand + at, value[0]);
  }
  WNFUSED_UNROLL for (int c = 0; c < kCols; ++c) gathered_poison[c] = poison[c];
}

// The sink of a convolution's products (pairs.h).
template <Ending kEnding>
class Finisher {
 public:
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

  // What follows are products of the rows from `first_row` on.
  void begin(const RowPixels& pixels, int64_t first_row) {
    pixels_ = pixels;
    first_row_ = first_row;
    // Lines without a gap are one.
    if (pixels.rows == pixels.width) pixels_.rows = pixels_.width = pixels.count;
  }

  TileSums place(int64_t group, int64_t groups, int64_t col, int64_t cols) {
    if (fetches_operand_) {
      const RowPlace row = place_of(group);
      target_ = {(pixels_.first + row.inside * pixels_.step) * geometry_.channel_blocks + block_of(col), cols,
                 smaller(groups * geometry_.pair_rows, pixels_.count - row.inside)};
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

  // Not zero if a value was not finite.
  Block end() {
    fetch_.finish();
    return poison_[0] + poison_[1];
  }

 private:
  // Up to so many blocks of outputs, what the epilogue reads and writes is fetched while the products are summed. Of more of
  // them the bank needs the first-level cache itself, and only what no cache holds is fetched.
  static constexpr int64_t kFewBlocks = 3;

  // Where a row is: in its line, and how many pixels of the map lie before it.
  struct RowPlace {
    int64_t x, inside;
  };

  RowPlace place_of(int64_t group) const {
    const int64_t row = first_row_ + group * geometry_.pair_rows, line = row / pixels_.rows;
    const int64_t x = row - line * pixels_.rows;
    return {x, line * pixels_.width + smaller(x, pixels_.width)};
  }

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
    auto [x, inside] = place_of(group);
    int64_t rows = groups * geometry_.pair_rows;
    while (rows > 0 && inside < pixels_.count) {
      const bool in_map = x < pixels_.width;
      const int64_t run = smaller(rows, (in_map ? pixels_.width : pixels_.rows) - x);
      if (in_map) {
        finish(block, pixels_.first + inside * pixels_.step, smaller(run, pixels_.count - inside), cols, sums, bias);
        inside += run;
      }
      sums.out += run * kLanes;
      rows -= run;
      x = x + run == pixels_.rows ? 0 : x + run;
    }
  }

  void finish(int64_t block, int64_t pixel, int64_t rows, int64_t cols, const TileSums& sums,
              const Block (&bias)[2]) {
    const int64_t blocks = geometry_.channel_blocks;
    if (full_) {
      const int64_t at = (pixel * blocks + block) * kLanes, step = pixels_.step * blocks * kLanes;
      if (cols == 2) finish_run<kEnding, 2>(epilogue_, at, step, rows, sums, bias, poison_);
      else finish_run<kEnding, 1>(epilogue_, at, step, rows, sums, bias, poison_);
      return;
    }
    for (int64_t r = 0; r < rows; ++r, pixel += pixels_.step)
      for (int64_t c = 0; c < cols; ++c) {
        const bool next_pixel = geometry_.row_pixels == 2;
        finish_pixel<kEnding>(geometry_, epilogue_, pixel + (next_pixel ? c : 0), block + (next_pixel ? 0 : c),
                              load(sums.out + c * sums.block_stride + r * kLanes), bias[c], poison_[0]);
      }
  }

  const Geometry& geometry_;
  const ConvEpilogue<uint16_t> epilogue_;
  const bool full_, fetches_sums_, fetches_operand_;
  const int64_t first_block_;
  float* const sums_;
  FetchBySteps fetch_;
  RowPixels pixels_{};
  int64_t first_row_ = 0;
  // Blocks of the map that are still to be fetched: the first one of a row, how many side by side, and rows.
  struct {
    int64_t block, cols, rows;
  } target_{};
  Block poison_[2] = {zero(), zero()};
};

}  // namespace wnfused::cpu::WNFUSED_ISA

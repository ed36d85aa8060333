// Pixels of a bfloat16 map, which has them one by one with all their channels, turned into runs: one channel's pixels
// side by side.
#pragma once

#include "cpu/conv/operands.h"
#include "cpu/conv/pair_panels.h"
#include "cpu/conv3x3/geometry.h"
#include "cpu/products/pairs.h"

namespace wnfused::cpu::WNFUSED_ISA {

constexpr int64_t kRun = 2 * kLanes;  // pixels that are transposed at once

// 16 channels of two pixels side by side, null for zeros.
WNFUSED_INLINE Block pairs_of(const uint16_t* even, const uint16_t* odd, int64_t lanes) {
  if (lanes == kLanes) return load_pairs(even, odd);
  uint16_t values[2][kLanes] = {};
  for (int64_t i = 0; i < lanes; ++i) {
    if (even) values[0][i] = even[i];
    if (odd) values[1][i] = odd[i];
  }
  return load_pairs(values[0], values[1]);
}

// Up to 16 pairs of pixels of one block of 16 channels, each channel's side by side: run[c] are the 32 of channel c, as
// bits. Pair i is the pixels `i` steps on from `even` and `odd`; there are `evens` and `odds` of them, and zeros
// beyond. Adds up the pixels in `sum`.
struct PixelPairs {
  const uint16_t *even, *odd;
  int64_t step, evens, odds;  // elements; pairs
};

WNFUSED_INLINE void transpose_pairs(const PixelPairs& pairs, int64_t lanes, Block (&run)[kLanes], Block& sum) {
  const uint16_t *even = pairs.even, *odd = pairs.odd;
  if (lanes == kLanes && pairs.evens >= kLanes && pairs.odds >= kLanes) {
    WNFUSED_UNROLL for (int64_t i = 0; i < kLanes; ++i, even += pairs.step, odd += pairs.step)
      run[i] = load_pairs(even, odd);
  } else {
    for (int64_t i = 0; i < kLanes; ++i, even += pairs.step, odd += pairs.step)
      run[i] = pairs_of(i < pairs.evens ? even : nullptr, i < pairs.odds ? odd : nullptr, lanes);
  }
  Block sums[4] = {zero(), zero(), zero(), zero()};  // a single one would be a chain of sixteen additions
  WNFUSED_UNROLL for (int i = 0; i < kLanes; ++i) sums[i % 4] = add_pairs(sums[i % 4], run[i]);
  sum = sum + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
  transpose(run);
}

// `count` pixels of a map, `pixel_step` apart, as pairs of neighbours.
WNFUSED_INLINE void transpose_pixels(const Geometry& geometry, const uint16_t* map, int64_t pixel, int64_t pixel_step,
                                     int64_t count, int64_t channel_block, Block (&run)[kLanes]) {
  const int64_t step = pixel_step * geometry.channels;
  const uint16_t* first = map + pixel * geometry.channels + channel_block * kLanes;
  Block unused = zero();
  transpose_pairs({first, first + step, 2 * step, (count + 1) / 2, count / 2}, lanes_of_block(geometry, channel_block),
                  run, unused);
}

// The first `count` of a run.
WNFUSED_INLINE void store_run(uint16_t* target, const Block& run, int64_t count) {
  if (count == kRun) return store_bits(target, run);
  uint16_t values[kRun];
  store_bits(values, run);
  for (int64_t i = 0; i < count; ++i) target[i] = values[i];
}

// A run of pixels from pixel p on, cut into lines of `width`, which lie `line` apart: pieces that lie in one line each.
struct LinePieces {
  int64_t piece, at[kRun];

  LinePieces(int64_t p, int64_t count, int64_t width, int64_t line)
      : piece(width % kRun == 0 ? kRun : width % kLanes == 0 ? kLanes : width % 8 == 0 ? 8 : 1) {
    int64_t y = p / width, x = p - y * width;
    for (int64_t i = 0; i * piece < count; ++i) {
      at[i] = y * line + x;
      if ((x += piece) == width) x = 0, ++y;
    }
  }

  // run[c]: the pixels of channel c, whose lines lie `plane` after those of the channel before.
  WNFUSED_INLINE void store(uint16_t* target, int64_t plane, const Block (&run)[kLanes], int64_t count) const {
    if (piece == kRun) {
      target += at[0];
      WNFUSED_UNROLL for (int c = 0; c < kLanes; ++c) store_bits(target + c * plane, run[c]);
      return;
    }
    uint16_t values[kLanes][kRun];
    WNFUSED_UNROLL for (int c = 0; c < kLanes; ++c) store_bits(values[c], run[c]);
    for (int c = 0; c < kLanes; ++c, target += plane) {
      if (piece == kLanes) store_pieces<kLanes>(target, values[c], count);
      else if (piece == 8) store_pieces<8>(target, values[c], count);
      else store_pieces<1>(target, values[c], count);
    }
  }

 private:
  template <int kPiece>
  WNFUSED_INLINE void store_pieces(uint16_t* target, const uint16_t* values, int64_t count) const {
    for (int64_t i = 0; i * kPiece < count; ++i)
      __builtin_memcpy(target + at[i], values + kPiece * i, kPiece * sizeof(uint16_t));
  }
};

}  // namespace wnfused::cpu::WNFUSED_ISA

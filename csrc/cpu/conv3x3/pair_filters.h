// Filters of 3x3 convolutions as pairs of bfloat16 along the depth (pairs.h):
//
//   bank: [segment][output block][pixel of a row][depth / 2][16 outputs][2]
#pragma once

#include "cpu/conv3x3/weight_units.h"
#include "cpu/products/pairs.h"

namespace wnfused::cpu::WNFUSED_ISA {

// The filters of one output block, whose places in the bank are found once; none in a bank of floats.
class PairFilters {
 public:
  PairFilters(const Geometry& geometry, float* weights, int64_t output_block)
      : pixels_(geometry.is_pairs() ? geometry.row_pixels : 0) {
    uint16_t* bank = reinterpret_cast<uint16_t*>(weights);
    if (pixels_) clear_padding(geometry, bank, output_block);
    const bool lines = geometry.method == Method::kLines;
    for (int64_t p = 0; p < pixels_; ++p)
      for (int k = 0; k < kTaps; ++k)
        taps_[p][k] = bank + geometry.filters_offset(lines ? k / 3 : k, output_block) + p * geometry.filters_stride() +
                      (p + (lines ? k % 3 : 0)) * geometry.padded_channels * kLanes;
  }

  // Those of depth `depth` and `depth` + 1: pairs(k) of tap k.
  template <class TapAt>
  WNFUSED_INLINE void put(int64_t depth, const TapAt& pairs) const {
    WNFUSED_UNROLL for (int k = 0; k < kTaps; ++k) {
      store_bits(taps_[0][k] + depth * kLanes, pairs(k));
      if (pixels_ == 2) store_bits(taps_[1][k] + depth * kLanes, pairs(k));
    }
  }

 private:
  // The depth that the bank has before and beyond the taps.
  static void clear_padding(const Geometry& geometry, uint16_t* bank, int64_t output_block) {
    const int64_t used = kTaps / geometry.segments * geometry.padded_channels, unused = geometry.segment_depth - used;
    for (int64_t segment = 0; unused && segment < geometry.segments; ++segment)
      for (int64_t p = 0; p < geometry.row_pixels; ++p) {
        uint16_t* filters = bank + geometry.filters_offset(segment, output_block) + p * geometry.filters_stride();
        const int64_t before = p * geometry.padded_channels;
        __builtin_memset(filters, 0, before * kLanes * sizeof(uint16_t));
        __builtin_memset(filters + (before + used) * kLanes, 0, (unused - before) * kLanes * sizeof(uint16_t));
      }
  }

  int64_t pixels_;            // of a row: one or two; none in a bank of floats
  uint16_t* taps_[2][kTaps];  // each pixel's, from the first depth on
};

// A unit's outputs as the depth of a data gradient, taps turned by 180 degrees.
template <bool kTapsFirst>
WNFUSED_INLINE void put_turned_pairs(const UnitRows& rows, const Block (&scale)[kLanes], const PairFilters& filters,
                                     int64_t depth) {
  const auto pairs_of_rows = [&](int64_t r, int64_t at) {
    const float* first = rows.data + r * rows.stride + at;
    return rounded_pairs(load(first) * scale[r], load(first + rows.stride) * scale[r + 1]);
  };
  if constexpr (kTapsFirst) {
    for (int64_t r = 0; r < kLanes; r += 2) {
      Block filter[kTaps];
      WNFUSED_UNROLL for (int k = 0; k < kTaps; ++k) filter[k] = pairs_of_rows(r, k * rows.tap_stride);
      filters.put(depth + r, [&filter](int k) { return filter[kTaps - 1 - k]; });
    }
    return;
  }
  // Pairs of rows are rounded, then turned; all of them first, since a quarter of a vector is not there before the
  // whole stores around it have left the core.
  float words[kLanes / 2][kTaps * kLanes];  // a pair each
  for (int64_t r = 0; r < kLanes; r += 2)
    WNFUSED_UNROLL for (int k = 0; k < kTaps; ++k) store(words[r / 2] + k * kLanes, pairs_of_rows(r, k * kLanes));
  for (int64_t r = 0; r < kLanes; r += 2) {
    const float* row = words[r / 2];
    Block filter[kTaps];
    load_columns(row, kTaps, filter);
    load_columns(row + 4, kTaps, filter + 4);
    load_columns<3>(row + 5, kTaps, filter + 8);
    filters.put(depth + r, [&filter](int k) { return filter[kTaps - 1 - k]; });
  }
}

}  // namespace wnfused::cpu::WNFUSED_ISA

// v of a convolution in units of 16 rows x 16 input channels, which is what banks are packed from and gradients turned
// into.
//
//   v, one output row:   [C][9] floats           a unit: 16 x 144 floats, 9 KB, nine transpositions of 16 x 16
//                                              in registers
//
// (Over three dims a row is [C][27], a unit three times as much, and there are three banks, level by level: kLevelTaps,
// Geometry's level_taps, is 3 there and 1 elsewhere.)
#pragma once

#include "cpu/conv/parameter_rows.h"
#include "cpu/conv3x3/geometry.h"

namespace wnfused::cpu::WNFUSED_ISA {

// v of one convolution: [outputs][inputs of a group][taps].
template <int kLevelTaps>
struct WeightShape {
  int64_t outputs, inputs;

  static constexpr int64_t taps = kLevelTaps * kTaps;
  static constexpr int64_t unit_floats = kLanes * taps;  // one row of a 16 x 16 unit
  int64_t row_floats() const { return inputs * taps; }
};

// Rows row0.. of v over the input channels of one block: `stride` floats apart, absent rows and channels zero. A row is
// [16][taps]; with taps first that many runs of 16, `tap_stride` floats apart.
struct UnitRows {
  const float* data;
  int64_t stride, tap_stride;
};

// The unit of groups that have blocks in common, as many channels each out as in: of those of the input block a row has
// its own group's, in their place, and zeros.
template <class Shape>
inline UnitRows shared_unit_rows(const Parameter& v, const Shape& shape, int64_t row0, int64_t input_block,
                                 int64_t sharing, float* staging) {
  const int64_t unit = shape.unit_floats, own = shape.inputs, input0 = input_block * kLanes;
  const int64_t runs = v.taps_first ? shape.taps : 1, channel = v.taps_first ? 1 : shape.taps;
  for (int64_t i = 0; i < kLanes * unit; i += kLanes) store(staging + i, zero());
  for (int64_t r = 0, rows = smaller(shape.outputs - row0, kLanes); r < rows; ++r) {
    const int64_t first = (row0 + r) % (sharing * own) / own * own;
    const int64_t begin = greater(first, input0), count = smaller(first + own, input0 + kLanes) - begin;
    if (count <= 0) continue;
    const int64_t source = (row0 + r) * shape.row_floats() + (begin - first) * channel;
    float* target = staging + r * unit + (begin - input0) * channel;
    for (int64_t i = 0; i < runs; ++i) read_run(v, source + i * own, count * channel, target + i * kLanes);
  }
  return {staging, unit, kLanes};
}

// `staging` holds a unit.
template <class Shape>
inline UnitRows unit_rows(const Parameter& v, const Shape& shape, int64_t convolution, int64_t row0,
                          int64_t input_block, int64_t sharing, float* staging) {
  const int64_t input0 = input_block * kLanes, row_floats = shape.row_floats(), unit = shape.unit_floats;
  if (sharing > 1) return shared_unit_rows(v, shape, row0, input_block, sharing, staging);
  const int64_t first =
      (convolution * shape.outputs + row0) * row_floats + (v.taps_first ? input0 : input0 * shape.taps);
  const int64_t rows = smaller(shape.outputs - row0, kLanes), inputs = smaller(shape.inputs - input0, kLanes);
  if (!v.bfloat16 && rows == kLanes && inputs == kLanes)
    return {static_cast<const float*>(v.data) + first, row_floats, shape.inputs};
  const int64_t runs = v.taps_first ? shape.taps : 1, run = v.taps_first ? kLanes : inputs * shape.taps;
  for (int64_t r = 0; r < kLanes; ++r) {
    float* target = staging + r * unit;
    for (int64_t i = 0; i < (r < rows ? runs : 0); ++i)
      read_run(v, first + r * row_floats + i * shape.inputs, run, target + i * kLanes);
    for (int64_t i = r < rows ? runs * run : 0; i < unit; ++i) target[i] = 0.0f;
  }
  return {staging, unit, kLanes};
}

// A unit's row as Blocks, as many as taps: where Block k lies in it, and which of the row's entries, numbered
// [16][taps], its lanes are. Taps come first in two dims only.
template <bool kTapsFirst>
struct UnitOrder {
  static constexpr bool taps_first = kTapsFirst;
  static int64_t block(int64_t k, int64_t tap_stride) { return k * (kTapsFirst ? tap_stride : kLanes); }
  static int64_t entry(int64_t k, int64_t lane) { return kTapsFirst ? k + lane * kTaps : k * kLanes + lane; }
};

template <class Run>
WNFUSED_INLINE void with_order(const Parameter& v, const Run& run) {
  if (v.taps_first) run(UnitOrder<true>());
  else run(UnitOrder<false>());
}

// Fetches a unit ahead: sixteen short runs in turn are no stream that a processor would recognise.
template <class Shape>
inline void fetch_unit(const Parameter& v, const Shape& shape, int64_t convolution, int64_t row0,
                       int64_t input_block) {
  const int64_t row_floats = shape.row_floats(), input0 = input_block * kLanes;
  if (v.bfloat16 || row0 + kLanes > shape.outputs || input0 + kLanes > shape.inputs) return;
  const float* data = static_cast<const float*>(v.data) + (convolution * shape.outputs + row0) * row_floats +
                      (v.taps_first ? input0 : input0 * shape.taps);
  const int64_t step = v.taps_first ? shape.inputs : kLanes;
  for (int64_t r = 0; r < kLanes; ++r)
    for (int64_t k = 0; k < shape.taps; ++k) __builtin_prefetch(data + r * row_floats + k * step);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

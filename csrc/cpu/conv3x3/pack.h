// Parameters to banks, and banks of gradients back to parameters.
//
//   v, one output row:   [C][9] floats           a unit of work: 16 rows x 16 input channels = 16 x 144 floats,
//   bank:                [planes][C/16][C][16]   9 KB, nine 16 x 16 transpositions in registers
//
// (Over three dims a row is [C][27], a unit three times as much, and there are three banks, level by level: kLevelTaps,
// Geometry's level_taps, is 3 there and 1 elsewhere.)
//
//   pack_forward    rows of 16 outputs -> lanes are outputs;   the row norm first, from the same cache lines
//   pack_backward   lanes are inputs, depth is outputs, taps turned by 180 degrees
//   finish_gradient adds the slices' banks in order and turns them into rows dW (finish_rows.h)
//
// Banks hold effective weights w = g v / ||v||: a product of inputs with v itself could leave the range of fp32 where
// the convolution does not. Floats, or pairs of bfloat16 along the depth (pairs.h).
//
// Each reads v once: 36 C^2 bytes a convolution are the floor, and what a stage with one small image is bound by.
#pragma once

#include "cpu/conv/finish_rows.h"
#include "cpu/conv/parameter_rows.h"
#include "cpu/conv3x3/winograd.h"
#include "cpu/products/pairs.h"

namespace wnfused::cpu::WNFUSED_ISA {

// v of one convolution: [outputs][inputs][taps].
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

// `staging` holds a unit.
template <class Shape>
inline UnitRows unit_rows(const Parameter& v, const Shape& shape, int64_t convolution, int64_t row0,
                      int64_t input_block, float* staging) {
  const int64_t input0 = input_block * kLanes, row_floats = shape.row_floats(), unit = shape.unit_floats;
  const int64_t first = (convolution * shape.outputs + row0) * row_floats + (v.taps_first ? input0 : input0 * shape.taps);
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

// A unit's row as Blocks, as many as taps: where Block k lies in it, and which of the row's entries, numbered [16][taps],
// its lanes are. Taps come first in two dims only.
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

// Filters in the bank: plane p of one (depth, output block) at target + p * plane_stride.
template <class TapAt>
WNFUSED_INLINE void put_filter(const Geometry& geometry, const TapAt& tap, float* target) {
  const auto part_of_tap = [&](int k, int part) { return tap(k).part[part]; };
  if (geometry.method == Method::kWinograd4) {
    filter_transform<4>(part_of_tap, target, geometry.plane_stride);
  } else if (geometry.method == Method::kWinograd2) {
    filter_transform<2>(part_of_tap, target, geometry.plane_stride);
  } else {
    WNFUSED_UNROLL for (int k = 0; k < kTaps; ++k) store(target + k * geometry.plane_stride, tap(k));
  }
}

// A segment's filters for one output block and pixel of a row, in a bank of pairs.
WNFUSED_INLINE uint16_t* filters_of(const Geometry& geometry, uint16_t* bank, int64_t segment, int64_t output_block,
                                    int64_t pixel) {
  const int64_t block = segment * geometry.channel_blocks + output_block;
  return bank + (block * geometry.row_pixels + pixel) * geometry.segment_depth * kLanes;
}

// Where each tap's filters of one output block lie in a bank of pairs, from the first depth on. Other banks have none.
struct TapFilters {
  uint16_t* of[2][kTaps];  // of a row's pixels

  TapFilters(const Geometry& geometry, uint16_t* bank, int64_t output_block) {
    if (!geometry.is_pairs()) return;
    const bool lines = geometry.method == Method::kLines;
    for (int k = 0; k < kTaps; ++k)
      for (int64_t p = 0; p < geometry.row_pixels; ++p) {
        const int64_t pixels = p + (lines ? k % 3 : 0);
        of[p][k] = filters_of(geometry, bank, lines ? k / 3 : k, output_block, p) +
                   pixels * geometry.padded_channels * kLanes;
      }
  }
};

// The filters of depth `depth` and `depth` + 1 in a bank of pairs.
template <class TapAt>
WNFUSED_INLINE void put_filter_pair(const TapFilters& filters, bool two_pixels, const TapAt& pairs, int64_t depth) {
  WNFUSED_UNROLL for (int k = 0; k < kTaps; ++k) {
    store_bits(filters.of[0][k] + depth * kLanes, pairs(k));
    if (two_pixels) store_bits(filters.of[1][k] + depth * kLanes, pairs(k));
  }
}

// The depth that a bank of pairs has before and beyond its taps.
inline void clear_padding(const Geometry& geometry, uint16_t* bank, int64_t output_block) {
  const int64_t used = kTaps / geometry.segments * geometry.padded_channels, unused = geometry.segment_depth - used;
  for (int64_t segment = 0; unused && segment < geometry.segments; ++segment)
    for (int64_t p = 0; p < geometry.row_pixels; ++p) {
      uint16_t* filters = filters_of(geometry, bank, segment, output_block, p);
      const int64_t before = p * geometry.padded_channels;
      __builtin_memset(filters, 0, before * kLanes * sizeof(uint16_t));
      __builtin_memset(filters + (before + used) * kLanes, 0, (unused - before) * kLanes * sizeof(uint16_t));
    }
}

// One output block of one convolution. `norm` may be null. `scratch`: two units and a row.
template <int kLevelTaps, class Job>
void pack_forward(const Job& job, int64_t convolution, int64_t output_block, const Bank& bank, float* norm,
                  float* scratch) {
  const Geometry& geometry = job.geometry;
  const WeightShape<kLevelTaps> shape{geometry.outputs, geometry.channels};
  float* staging = scratch;
  float* lanes = scratch + kLanes * shape.unit_floats;  // [16 inputs][taps][16 outputs]
  const int64_t row0 = output_block * kLanes;
  Block scale[kLanes];
  measure_scales(job, geometry.outputs, shape.row_floats(), convolution, output_block, bank.bias, norm,
                 lanes + kLanes * shape.unit_floats, scale);
  float* target = bank.weights + output_block * geometry.padded_channels * kLanes;
  uint16_t* pairs = reinterpret_cast<uint16_t*>(bank.weights);
  if (geometry.is_pairs()) clear_padding(geometry, pairs, output_block);
  const TapFilters filters(geometry, pairs, output_block);
  const bool two_pixels = geometry.is_pairs() && geometry.row_pixels == 2;
  for (int64_t input_block = 0; input_block < geometry.channel_blocks; ++input_block) {
    const UnitRows rows = unit_rows(job.v, shape, convolution, row0, input_block, staging);
    if (input_block + 1 < geometry.channel_blocks) fetch_unit(job.v, shape, convolution, row0, input_block + 1);
    with_order(job.v, [&](auto order) __attribute__((always_inline)) {
      for (int64_t k = 0; k < shape.taps; ++k) {
        Block block[kLanes];
        const float* source = rows.data + order.block(k, rows.tap_stride);
        WNFUSED_UNROLL for (int r = 0; r < kLanes; ++r) block[r] = load(source + r * rows.stride) * scale[r];
        transpose(block);
        WNFUSED_UNROLL for (int r = 0; r < kLanes; ++r)
          store(lanes + order.entry(k, r) * kLanes, job.round_operands ? round_to_bfloat16(block[r]) : block[r]);
      }
    });
    const auto filter = [&](int input, int64_t level = 0) {
      return [taps = lanes + (input * shape.taps + level * kTaps) * kLanes](int k) { return load(taps + k * kLanes); };
    };
    if (geometry.is_pairs()) {
      for (int i = 0; i < kLanes; i += 2) {
        const auto pairs_of_tap = [even = filter(i), odd = filter(i + 1)](int k) { return rounded_pairs(even(k), odd(k)); };
        put_filter_pair(filters, two_pixels, pairs_of_tap, input_block * kLanes + i);
      }
    } else {
      for (int64_t l = 0; l < kLevelTaps; ++l)
        for (int i = 0; i < kLanes; ++i)
          put_filter(geometry, filter(i, l), target + l * geometry.level_bank() + i * kLanes);
      target += kLanes * kLanes;
    }
  }
}

// 16 inputs x 9 taps of one row of a unit, transposed and scaled: filter[k] is tap k of 16 inputs. An input has `taps`,
// and those are the ones from `first` on.
template <bool kTapsFirst>
WNFUSED_INLINE void row_filters(const UnitRows& rows, int64_t r, int64_t taps, int64_t first, const Block& scale,
                                bool round, Block (&filter)[kLanes]) {
  const float* row = rows.data + r * rows.stride + first;
  if constexpr (kTapsFirst) {
    WNFUSED_UNROLL for (int k = 0; k < kTaps; ++k) filter[k] = load(row + k * rows.tap_stride);
  } else {
    // The last input's load would pass the end of the row, so its 9 taps are copied out first.
    float last[kLanes] = {};
    __builtin_memcpy(last, row + (kLanes - 1) * taps, kTaps * sizeof(float));
    WNFUSED_UNROLL for (int i = 0; i < kLanes - 1; ++i) filter[i] = load(row + i * taps);
    filter[kLanes - 1] = load(last);
    transpose(filter);
  }
  WNFUSED_UNROLL for (int k = 0; k < kTaps; ++k) {
    filter[k] = filter[k] * scale;
    if (round) filter[k] = round_to_bfloat16(filter[k]);
  }
}

// Rows r and r + 1 of a unit, scaled and rounded: filter[k] are pairs of tap k of 16 inputs.
template <bool kTapsFirst>
WNFUSED_INLINE void row_filter_pairs(const UnitRows& rows, int64_t r, const Block& even, const Block& odd,
                                     Block (&filter)[kLanes]) {
  const float *first = rows.data + r * rows.stride, *second = first + rows.stride;
  if constexpr (kTapsFirst) {
    WNFUSED_UNROLL for (int k = 0; k < kTaps; ++k) {
      const int64_t at = k * rows.tap_stride;
      filter[k] = rounded_pairs(load(first + at) * even, load(second + at) * odd);
    }
  } else {
    // The last input's load passes the end.
    uint16_t entries[(kTaps + 1) * 2 * kLanes];
    WNFUSED_UNROLL for (int k = 0; k < kTaps; ++k) {
      const int64_t at = k * kLanes;
      store_pairs(entries + 2 * at, load(first + at) * even, load(second + at) * odd);
    }
    store_bits(entries + kTaps * 2 * kLanes, zero());
    WNFUSED_UNROLL for (int i = 0; i < kLanes; ++i) filter[i] = load_bits(entries + i * 2 * kTaps);
    transpose(filter);
  }
}

// One block of 16 inputs of one convolution, the outputs of its data gradient, whose geometry is given. `scratch`: a
// unit.
template <int kLevelTaps, class Job>
void pack_backward(const Job& job, const Geometry& geometry, int64_t convolution, int64_t input_block, float factor,
                   const Bank& bank, float* scratch) {
  const WeightShape<kLevelTaps> shape{geometry.channels, geometry.outputs};
  uint16_t* pairs = reinterpret_cast<uint16_t*>(bank.weights);
  if (geometry.is_pairs()) clear_padding(geometry, pairs, input_block);
  const TapFilters filters(geometry, pairs, input_block);
  const bool two_pixels = geometry.is_pairs() && geometry.row_pixels == 2;
  float* target = bank.weights + input_block * geometry.padded_channels * kLanes;
  for (int64_t output_block = 0; output_block < geometry.channel_blocks; ++output_block) {
    const UnitRows rows = unit_rows(job.v, shape, convolution, output_block * kLanes, input_block, scratch);
    Block scale[kLanes];
    for (int64_t r = 0; r < kLanes; ++r) {
      const int64_t channel = output_block * kLanes + r, index = convolution * geometry.channels + channel;
      scale[r] = splat(channel < geometry.channels ? factor * row_scale(job, index) : 0.0f);
    }
    if (output_block + 1 < geometry.channel_blocks)
      fetch_unit(job.v, shape, convolution, (output_block + 1) * kLanes, input_block);
    if (geometry.is_pairs()) {
      with_order(job.v, [&](auto order) __attribute__((always_inline)) {
        for (int64_t r = 0; r < kLanes; r += 2) {
          Block filter[kLanes];
          row_filter_pairs<decltype(order)::taps_first>(rows, r, scale[r], scale[r + 1], filter);
          put_filter_pair(filters, two_pixels, [&filter](int k) { return filter[kTaps - 1 - k]; },
                          output_block * kLanes + r);
        }
      });
      continue;
    }
    Block filter[2][kLanes];
    const auto turned = [&filter](int which) {
      return [&taps = filter[which]](int k) { return taps[kTaps - 1 - k]; };
    };
    with_order(job.v, [&](auto order) __attribute__((always_inline)) {
      for (int64_t r = 0; r < kLanes; r += 2, target += 2 * kLanes) {
        for (int64_t l = 0; l < kLevelTaps; ++l) {
          const int64_t first = (kLevelTaps - 1 - l) * kTaps;
          WNFUSED_UNROLL for (int i = 0; i < 2; ++i)
            row_filters<decltype(order)::taps_first>(rows, r + i, shape.taps, first, scale[r + i], job.round_operands,
                                                     filter[i]);
          float* level = target + l * geometry.level_bank();
          put_filter(geometry, turned(0), level);
          put_filter(geometry, turned(1), level + kLanes);
        }
      }
    });
  }
}

// dW of one (input, output block), the slices' banks summed in order; taps at target.
template <int kLevelTaps>
inline void sum_slices(const Geometry& geometry, const float* bank, float* target) {
  for (int k = 0; k < kLevelTaps * kTaps; ++k) {
    const float* tap = bank + k * geometry.gradient_stride;
    Block sum = load(tap);
    for (int64_t s = 1; s < geometry.wgrad_slices; ++s) sum = sum + load(tap + s * geometry.gradient_size());
    store(target + k * kLanes, sum);
  }
}

// Nine taps of 16 inputs, [tap][input] with `stride` floats from one tap to the next, as [input][tap].
WNFUSED_INLINE void interleave_taps(const float* taps, int64_t stride, float* target) {
#if WNFUSED_VECTOR_BITS == 512
  // Four inputs at a time. Loads put four taps side by side, so that one permutation turns a square of them.
  const __m512i turn = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i first_two = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i last_two = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  // Of [0: first two or last two][16: the ninth tap]; and from the second input's end to the fourth one's middle.
  const __m512i begin = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 16, 8, 9, 10, 11, 12, 13, 14);
  const __m512i middle = _mm512_setr_epi32(15, 0, 16, 17, 18, 19, 20, 21, 22, 23, 0, 24, 25, 26, 27, 28);
  const __m512i ninth = _mm512_setr_epi32(0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0);
  const __m512i end = _mm512_setr_epi32(13, 14, 15, 19, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  WNFUSED_UNROLL for (int i = 0; i < kLanes; i += 4, target += 4 * kTaps) {
    const auto four_taps = [&](int tap) {
      const float* at = taps + tap * stride + i;
      __m512 lanes = _mm512_castps128_ps512(_mm_loadu_ps(at));
      lanes = _mm512_mask_broadcast_f32x4(lanes, 0x00f0, _mm_loadu_ps(at + stride));
      lanes = _mm512_mask_broadcast_f32x4(lanes, 0x0f00, _mm_loadu_ps(at + 2 * stride));
      lanes = _mm512_mask_broadcast_f32x4(lanes, 0xf000, _mm_loadu_ps(at + 3 * stride));
      return _mm512_permutexvar_ps(turn, lanes);
    };
    const __m512 low = four_taps(0), high = four_taps(4);
    const __m512 last = _mm512_castps128_ps512(_mm_loadu_ps(taps + 8 * stride + i));
    const __m512 two = _mm512_permutex2var_ps(low, first_two, high), more = _mm512_permutex2var_ps(low, last_two, high);
    _mm512_storeu_ps(target, _mm512_permutex2var_ps(two, begin, last));
    const __m512 across = _mm512_permutex2var_ps(two, middle, more);
    _mm512_storeu_ps(target + kLanes, _mm512_mask_permutexvar_ps(across, 0x0402, ninth, last));
    _mm_storeu_ps(target + 2 * kLanes, _mm512_castps512_ps128(_mm512_permutex2var_ps(more, end, last)));
  }
#else
  Block block[kLanes];
  WNFUSED_UNROLL for (int k = 0; k < kLanes; ++k) block[k] = k < kTaps ? load(taps + k * stride) : zero();
  transpose(block);
  float last[kLanes];
  WNFUSED_UNROLL for (int i = 0; i < kLanes - 1; ++i) store(target + i * kTaps, block[i]);
  store(last, block[kLanes - 1]);
  __builtin_memcpy(target + (kLanes - 1) * kTaps, last, kTaps * sizeof(float));
#endif
}

// The same of a bank whose blocks have outputs as rows and inputs as lanes, as rows of [16][taps] or, taps first, taps that
// lie `tap_stride` apart. `staging` holds nine Blocks.
template <bool kTapsFirst>
inline void sum_turned_slices(const Geometry& geometry, const float* bank, float* target, int64_t row_stride,
                              int64_t tap_stride, float* staging) {
  for (int r = 0; r < kLanes; ++r, bank += kLanes, target += row_stride) {
    const bool single = geometry.wgrad_slices == 1;
    for (int k = 0; k < (single && !kTapsFirst ? 0 : kTaps); ++k) {
      const float* tap = bank + k * geometry.gradient_stride;
      Block sum = load(tap);
      for (int64_t s = 1; s < geometry.wgrad_slices; ++s) sum = sum + load(tap + s * geometry.gradient_size());
      store(kTapsFirst ? target + k * tap_stride : staging + k * kLanes, sum);
    }
    if constexpr (!kTapsFirst) {
      if (single) interleave_taps(bank, geometry.gradient_stride, target);
      else interleave_taps(staging, kLanes, target);
    }
  }
}

inline int64_t padded_row_floats(const Geometry& geometry) { return geometry.padded_channels * geometry.taps(); }

// dv, dg and dbias of one output block. factor: what every gradient that reached this convolution was scaled by.
// `scratch`: a unit and kFinishRows rows.
template <int kLevelTaps, class Job>
void finish_gradient(const Job& job, int64_t convolution, int64_t output_block, float factor, const float* bank,
                     const float* bias_gradient, float* scratch) {
  const Geometry& geometry = job.geometry;
  const WeightShape<kLevelTaps> shape{geometry.outputs, geometry.channels};
  const int64_t row_floats = padded_row_floats(geometry);
  float* lanes = scratch;
  float* gradients = lanes + kLanes * shape.unit_floats;
  float* row = gradients + kLanes * row_floats;
  fetch_row(job, convolution * geometry.outputs + output_block * kLanes, shape.row_floats());
  for (int64_t input_block = 0; input_block < geometry.channel_blocks; ++input_block) {
    const int64_t input0 = input_block * kLanes;
    if (geometry.wgrad_turned) {
      const float* source = bank + (input_block * geometry.padded_channels + output_block * kLanes) * kLanes;
      with_order(job.v, [&](auto order) {
        constexpr bool kTapsFirst = decltype(order)::taps_first;
        float* target = gradients + (kTapsFirst ? input0 : input0 * shape.taps);
        sum_turned_slices<kTapsFirst>(geometry, source, target, row_floats, geometry.channels, lanes);
      });
      continue;
    }
    const float* source = bank + (output_block * geometry.padded_channels + input0) * kLanes;
    for (int i = 0; i < kLanes; ++i)
      sum_slices<kLevelTaps>(geometry, source + i * kLanes, lanes + i * shape.taps * kLanes);
    with_order(job.v, [&](auto order) __attribute__((always_inline)) {
      float* target = gradients + (order.taps_first ? input0 : input0 * shape.taps);
      for (int64_t k = 0; k < shape.taps; ++k) {
        Block block[kLanes];
        WNFUSED_UNROLL for (int r = 0; r < kLanes; ++r) block[r] = load(lanes + order.entry(k, r) * kLanes);
        transpose(block);
        const int64_t at = order.block(k, geometry.channels);
        WNFUSED_UNROLL for (int r = 0; r < kLanes; ++r) store(target + r * row_floats + at, block[r]);
      }
    });
  }
  finish_rows(job, geometry.outputs, {shape.row_floats(), row_floats}, convolution, output_block, factor,
              gradients, job.dbias, bias_gradient, geometry.wgrad_slices, row);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

// Banks of gradients to parameters: the slices' banks added in order, turned into rows of dW, and weight
// normalisation's backward of those (finish_rows.h).
#pragma once

#include "cpu/conv/finish_rows.h"
#include "cpu/conv3x3/weight_units.h"

namespace wnfused::cpu::WNFUSED_ISA {

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

// sum_slices of a bank whose blocks have outputs as rows and inputs as lanes, as rows of [16][taps] or, taps first,
// taps that lie `tap_stride` apart. `staging` holds nine Blocks.
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

// Rows of dW, those of an output block, over all channels that groups have in common, `row_floats` apart: each row's
// own group's ones come together, rows so padded; finish_rows clears what follows.
inline void take_own_channels(const Geometry& geometry, int64_t output_block, bool taps_first, int64_t row_floats,
                              int64_t padded, float* gradients) {
  const int64_t own = geometry.row_channels(), taps = geometry.taps();
  const int64_t runs = taps_first ? taps : 1, run = taps_first ? own : own * taps;
  const int64_t row0 = output_block % geometry.group_blocks * kLanes;
  for (int64_t r = 0; r < kLanes; ++r) {
    const float* source = gradients + r * row_floats + (row0 + r) / own * run;
    float* row = gradients + r * padded;
    for (int64_t i = 0; i < runs; ++i)
      __builtin_memmove(row + i * run, source + i * geometry.depth, run * sizeof(float));
  }
}

// dv, dg and dbias of one output block, whose part of the bank begins at `bank`. factor: what every gradient that
// reached this convolution was scaled by.
// `scratch`: a unit and kFinishRows rows.
template <int kLevelTaps, class Job>
void finish_gradient(const Job& job, int64_t convolution, int64_t output_block, float factor, const float* bank,
                     const float* bias_gradient, float* scratch) {
  const Geometry& geometry = job.geometry;
  const WeightShape<kLevelTaps> shape{geometry.outputs, geometry.row_channels()};
  const int64_t row_floats = geometry.padded_row_floats();
  float* lanes = scratch;
  float* gradients = lanes + kLanes * shape.unit_floats;
  float* row = gradients + kLanes * row_floats;
  fetch_row(job, convolution * geometry.outputs + output_block * kLanes, shape.row_floats());
  const BlockRange met = geometry.met_blocks(output_block);
  for (int64_t input_block = met.begin; input_block < met.end; ++input_block) {
    const int64_t input0 = input_block * kLanes;
    if (geometry.wgrad_turned) {
      const float* source = bank + input_block * geometry.padded_channels * kLanes;
      with_order(job.v, [&](auto order) {
        constexpr bool kTapsFirst = decltype(order)::taps_first;
        float* target = gradients + (kTapsFirst ? input0 : input0 * shape.taps);
        sum_turned_slices<kTapsFirst>(geometry, source, target, row_floats, geometry.channels, lanes);
      });
      continue;
    }
    const float* source = bank + input0 * kLanes;
    for (int i = 0; i < kLanes; ++i)
      sum_slices<kLevelTaps>(geometry, source + i * kLanes, lanes + i * shape.taps * kLanes);
    with_order(job.v, [&](auto order) __attribute__((always_inline)) {
      float* target = gradients + (order.taps_first ? input0 : input0 * shape.taps);
      for (int64_t k = 0; k < shape.taps; ++k) {
        Block block[kLanes];
        WNFUSED_UNROLL for (int r = 0; r < kLanes; ++r) block[r] = load(lanes + order.entry(k, r) * kLanes);
        transpose(block);
        const int64_t at = order.block(k, geometry.depth);
        WNFUSED_UNROLL for (int r = 0; r < kLanes; ++r) store(target + r * row_floats + at, block[r]);
      }
    });
  }
  const bool shared = geometry.sharing > 1;
  const int64_t padded = shared ? divide_up(shape.row_floats(), kLanes) * kLanes : row_floats;
  if (shared) take_own_channels(geometry, output_block, job.v.taps_first, row_floats, padded, gradients);
  finish_rows(job, geometry.outputs, {shape.row_floats(), padded}, convolution, output_block, factor,
              gradients, job.dbias, bias_gradient, geometry.wgrad_slices, row);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

// Parameters to banks.
//
//   bank: [planes][C/16][C][16]           of a layer in groups [planes][outputs/16][a group's channels][16]
//
//   pack_forward    rows of 16 outputs -> lanes are outputs;   the row norm first, from the same cache lines
//   pack_backward   lanes are inputs, depth is outputs, taps turned by 180 degrees
//
// Banks hold effective weights w = g v / ||v||: a product of inputs with v itself could leave the range of fp32 where
// the convolution does not. Floats, or pairs of bfloat16 (pair_filters.h).
//
// Each reads v once: 36 C^2 bytes a convolution are the floor, and what a stage with one small image is bound by.
#pragma once

#include "cpu/conv3x3/pair_filters.h"
#include "cpu/conv3x3/winograd.h"

namespace wnfused::cpu::WNFUSED_ISA {

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

// One output block of one convolution. `norm` may be null. `scratch`: two units.
template <int kLevelTaps, class Job>
void pack_forward(const Job& job, int64_t convolution, int64_t output_block, const Bank& bank, float* norm,
                  float* scratch) {
  const Geometry& geometry = job.geometry;
  const WeightShape<kLevelTaps> shape{geometry.outputs, geometry.row_channels()};
  float* staging = scratch;
  float* lanes = scratch + kLanes * shape.unit_floats;  // [16 inputs][taps][16 outputs]
  const int64_t row0 = output_block * kLanes;
  const Block scale =
      measure_scales(job, geometry.outputs, shape.row_floats(), convolution, output_block, bank.bias, norm);
  const BlockRange met = geometry.met_blocks(output_block);
  float* target = bank.weights + output_block * geometry.block_floats() + met.begin * kLanes * kLanes;
  const PairFilters pair_filters(geometry, bank.weights, output_block);
  for (int64_t input_block = met.begin; input_block < met.end; ++input_block) {
    const UnitRows rows = unit_rows(job.v, shape, convolution, row0, input_block, geometry.sharing, staging);
    if (input_block + 1 < met.end && geometry.sharing == 1)
      fetch_unit(job.v, shape, convolution, row0, input_block + 1);
    with_order(job.v, [&](auto order) __attribute__((always_inline)) {
      for (int64_t k = 0; k < shape.taps; ++k) {
        Block block[kLanes];
        const float* source = rows.data + order.block(k, rows.tap_stride);
        WNFUSED_UNROLL for (int r = 0; r < kLanes; ++r) block[r] = load(source + r * rows.stride);
        transpose(block);
        WNFUSED_UNROLL for (int r = 0; r < kLanes; ++r) {
          const Block scaled = block[r] * scale;
          store(lanes + order.entry(k, r) * kLanes, job.round_operands ? round_to_bfloat16(scaled) : scaled);
        }
      }
    });
    const auto filter = [&](int input, int64_t level = 0) {
      return [taps = lanes + (input * shape.taps + level * kTaps) * kLanes](int k) { return load(taps + k * kLanes); };
    };
    if (geometry.is_pairs()) {
      for (int i = 0; i < kLanes; i += 2) {
        const auto pairs_of_tap = [even = filter(i), odd = filter(i + 1)](int k) {
          return rounded_pairs(even(k), odd(k));
        };
        pair_filters.put(input_block * kLanes + i, pairs_of_tap);
      }
    } else {
      for (int64_t l = 0; l < kLevelTaps; ++l) {
        if (!geometry.meets_level(l)) continue;
        for (int i = 0; i < kLanes; ++i)
          put_filter(geometry, filter(i, l), target + l * geometry.level_bank() + i * kLanes);
      }
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
    load_columns(row, taps, filter);
    load_columns(row + 4, taps, filter + 4);
    load_columns<3>(row + 5, taps, filter + 8);
  }
  WNFUSED_UNROLL for (int k = 0; k < kTaps; ++k) {
    filter[k] = filter[k] * scale;
    if (round) filter[k] = round_to_bfloat16(filter[k]);
  }
}

// One block of 16 inputs of one convolution, the outputs of its data gradient, whose geometry is given. `scratch`: a
// unit.
template <int kLevelTaps, class Job>
void pack_backward(const Job& job, const Geometry& geometry, int64_t convolution, int64_t input_block, float factor,
                   const Bank& bank, float* scratch) {
  // Groups that share blocks have as many channels out as in.
  const int64_t own = geometry.sharing > 1 ? geometry.row_channels() : geometry.outputs / geometry.groups;
  const WeightShape<kLevelTaps> shape{geometry.channels, own};
  const PairFilters pair_filters(geometry, bank.weights, input_block);
  const BlockRange met = geometry.met_blocks(input_block);
  float* target = bank.weights + input_block * geometry.block_floats() + met.begin * kLanes * kLanes;
  const int64_t first_row = geometry.source_block(input_block) * kLanes;
  const int64_t block_of_row = input_block % geometry.group_blocks;
  for (int64_t output_block = met.begin; output_block < met.end; ++output_block) {
    const int64_t row = first_row + output_block * kLanes;
    const UnitRows rows = unit_rows(job.v, shape, convolution, row, block_of_row, geometry.sharing, scratch);
    Block scale[kLanes];
    for (int64_t r = 0; r < kLanes; ++r) {
      const int64_t channel = row + r, index = convolution * geometry.channels + channel;
      scale[r] = splat(channel < geometry.channels ? factor * row_scale(job, index) : 0.0f);
    }
    if (output_block + 1 < met.end && geometry.sharing == 1)
      fetch_unit(job.v, shape, convolution, row + kLanes, block_of_row);
    if (geometry.is_pairs()) {
      with_order(job.v, [&](auto order) __attribute__((always_inline)) {
        put_turned_pairs<decltype(order)::taps_first>(rows, scale, pair_filters, output_block * kLanes);
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
          if (!geometry.meets_level(l)) continue;
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

}  // namespace wnfused::cpu::WNFUSED_ISA

// Parameters to banks of pairs, and sums of a weight gradient back to parameters.
//
//   v, one row:   [C][taps], or channels_last [taps][C]
#pragma once

#include "cpu/conv/finish_rows.h"
#include "cpu/conv/layer_job.h"
#include "cpu/pair_window/pair_window.h"
#include "cpu/products/pairs.h"
#include "cpu/vec/runs.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Whether the channels of a tap are one run of a row.
WNFUSED_INLINE bool has_channel_runs(const Parameter& v, int64_t taps) { return v.taps_first || taps == 1; }

WNFUSED_INLINE void copy_lanes(float* target, const Block& value, int64_t lanes) {
  float values[kLanes];
  store(values, value);
  for (int64_t i = 0; i < lanes; ++i) target[i] = values[i];
}

template <class T>
WNFUSED_INLINE Block load_some(const T* source, int64_t lanes) {
  if (lanes >= kLanes) return load(source);
  return lanes > 0 ? load(source, lanes) : zero();
}

// use(entries) with those of v in their own type.
template <class Use>
WNFUSED_INLINE void with_entries(const Parameter& v, const Use& use) {
  if (v.bfloat16) use(static_cast<const uint16_t*>(v.data));
  else use(static_cast<const float*>(v.data));
}

// Calls put(plane, depth) for every tap of an output block's part of the bank: its plane in v, and the depth there of
// its first channel.
template <class Put>
WNFUSED_INLINE void for_taps(const PairWindow& window, const Put& put) {
  const int64_t channels = window.thin ? window.source.channels : window.pixel;
  for (int64_t i = 0; i < window.grid_count; ++i) {
    const PairGrid& grid = window.grids[i];
    for (int64_t s = 0; s < grid.segments; ++s) {
      const PairSegment& segment = window.segments[grid.first_segment + s];
      const int64_t depth = window.thin ? s * grid.run * channels : s * grid.depth;
      for (int64_t t = 0; t < grid.run; ++t)
        put(segment.first_plane + t * segment.plane_step, grid.bank / kLanes + depth + t * channels);
    }
  }
}

// Where depth `depth` of lane 0 is, from an output block's beginning.
WNFUSED_INLINE int64_t pair_place(int64_t depth) { return depth / 2 * (2 * kLanes) + depth % 2; }

// Sixteen lanes at one depth, in a bank where the neighbour in its pairs is put by itself.
WNFUSED_INLINE void put_single(uint16_t* block, int64_t depth, const Block& value) {
  float values[kLanes];
  store(values, value);
  uint16_t* target = block + pair_place(depth);
  for (int i = 0; i < kLanes; ++i) target[2 * i] = to_bfloat16(values[i]);
}

// Puts `channels` channels from `channel0` on into every tap; at(channel, plane): the Block of one of them.
template <class At>
WNFUSED_INLINE void put_channels(const PairWindow& window, uint16_t* block, int64_t channel0, int64_t channels,
                                 const At& at) {
  if (window.thin) {
    for_taps(window, [&](int64_t plane, int64_t depth) {
      for (int64_t c = 0; c < channels; ++c) put_single(block, depth + channel0 + c, at(c, plane));
    });
    return;
  }
  for_taps(window, [&](int64_t plane, int64_t depth) {
    uint16_t* target = block + (depth + channel0) * kLanes;
    for (int64_t c = 0; c < channels; c += 2)
      store_pairs(target + c * kLanes, at(c, plane), c + 1 < channels ? at(c + 1, plane) : zero());
  });
}

// One block of outputs, scaled, to its part of the bank, where the channels of a tap are one run of a row: pairs of
// them are words, which are transposed as such.
template <class T>
void pack_channel_runs(const PairWindow& window, const T* rows, int64_t count, const Block (&scale)[kLanes],
                       uint16_t* block) {
  const int64_t channels = window.source.channels, floats = window.row_floats();
  for_taps(window, [&](int64_t plane, int64_t depth) {
    for (int64_t c = 0; c < channels; c += 2 * kLanes) {
      Block words[kLanes];
      const T* source = rows + plane * channels + c;
      for (int64_t r = 0; r < kLanes; ++r, source += floats)
        words[r] = r < count ? rounded_run(load_some(source, channels - c) * scale[r],
                                           load_some(source + kLanes, channels - c - kLanes) * scale[r])
                             : zero();
      transpose(words);
      const int64_t pairs = smaller((channels - c + 1) / 2, kLanes);
      uint16_t* target = block + (depth + c) * kLanes;
      for (int64_t p = 0; p < pairs; ++p) store_bits(target + p * 2 * kLanes, words[p]);
    }
  });
}

// The same in either order. `scratch`: 16 channels of all taps.
template <class T>
void pack_rows(const PairWindow& window, const T* values, bool taps_first, int64_t rows, const Block (&scale)[kLanes],
               uint16_t* block, float* scratch) {
  const int64_t channels = window.source.channels, taps = window.row_taps, floats = window.row_floats();
  for (int64_t channel0 = 0; channel0 < channels; channel0 += kLanes) {
    const int64_t here = smaller(channels - channel0, kLanes);
    // [16][taps][16 lanes], or [taps][16][16 lanes].
    const int64_t runs = taps_first ? taps : 1, run = taps_first ? here : here * taps;
    for (int64_t i = 0; i < runs; ++i) {
      const T* source = values + (taps_first ? i * channels + channel0 : channel0 * taps);
      float* target = scratch + i * kLanes * kLanes;
      for (int64_t e = 0; e < run; e += kLanes) {
        Block part[kLanes];
        for (int64_t r = 0; r < kLanes; ++r)
          part[r] = r < rows ? load_some(source + r * floats + e, run - e) * scale[r] : zero();
        transpose(part);
        const int64_t count = smaller(run - e, kLanes);
        for (int64_t k = 0; k < count; ++k) store(target + (e + k) * kLanes, part[k]);
      }
    }
    const int64_t channel_step = taps_first ? kLanes : taps * kLanes, tap_step = taps_first ? kLanes * kLanes : kLanes;
    put_channels(window, block, channel0, here,
                 [&](int64_t c, int64_t plane) { return load(scratch + c * channel_step + plane * tap_step); });
  }
}

// One block of outputs, scaled, to its part of the bank. `scratch`: 16 channels of all taps.
inline void pack_pair_window(const PairWindow& window, const Parameter& v, int64_t output_block,
                             const Block (&scale)[kLanes], uint16_t* block, float* scratch) {
  const int64_t rows = smaller(window.target.channels - output_block * kLanes, kLanes);
  const bool taps_first = has_channel_runs(v, window.row_taps);
  __builtin_memset(block, 0, window.block_elements * sizeof(uint16_t));
  with_entries(v, [&](const auto* entries) {
    const auto* values = entries + output_block * kLanes * window.row_floats();
    if (taps_first && !window.thin) pack_channel_runs(window, values, rows, scale, block);
    else pack_rows(window, values, taps_first, rows, scale, block, scratch);
  });
}

// 16 channels of a row of v, all taps: [taps][16 lanes].
template <class T>
void turn_row(const T* row, int64_t channels, int64_t taps, bool taps_first, int64_t channel0, const Block& scale,
              float* target) {
  const int64_t here = smaller(channels - channel0, kLanes);
  for (int64_t k = 0; k < taps && taps_first; ++k)
    store(target + k * kLanes, load_some(row + k * channels + channel0, here) * scale);
  for (int64_t k0 = 0; k0 < taps && !taps_first; k0 += kLanes) {
    Block part[kLanes];
    for (int64_t i = 0; i < kLanes; ++i)
      part[i] = i < here ? load_some(row + (channel0 + i) * taps + k0, taps - k0) : zero();
    transpose(part);
    const int64_t count = smaller(taps - k0, kLanes);
    for (int64_t k = 0; k < count; ++k) store(target + (k0 + k) * kLanes, part[k] * scale);
  }
}

// One block of inputs, the outputs of the data gradient: the rows of v are the source's channels. `scratch`: two rows
// of 16 channels of all taps.
template <class Job>
void pack_turned_pair_window(const Job& job, const PairWindow& window, int64_t input_block, uint16_t* block,
                             float* scratch) {
  const int64_t inputs = window.target.channels, taps = window.row_taps, outputs = window.source.channels;
  const bool taps_first = has_channel_runs(job.v, taps);
  __builtin_memset(block, 0, window.block_elements * sizeof(uint16_t));
  for (int64_t output0 = 0; output0 < outputs; output0 += 2) {
    const int64_t rows = smaller(outputs - output0, 2);
    with_entries(job.v, [&](const auto* entries) {
      for (int64_t r = 0; r < rows; ++r)
        turn_row(entries + (output0 + r) * inputs * taps, inputs, taps, taps_first, input_block * kLanes,
                 splat(row_scale(job, output0 + r)), scratch + r * taps * kLanes);
    });
    put_channels(window, block, output0, rows,
                 [&](int64_t c, int64_t plane) { return load(scratch + (c * taps + plane) * kLanes); });
  }
}

// dv, dg and dbias of one output block, from the slices' sums. `scratch`: kFinishRows rows of whole Blocks.
template <class Job>
void finish_pair_gradient(const Job& job, const PairWindow& window, int64_t output_block, const float* sums,
                          const Parameter& dbias, const float* bias_gradient, int64_t bias_slices, float* scratch) {
  const int64_t taps = window.row_taps, channels = window.source.channels, floats = window.row_floats();
  const int64_t padded = (floats + kLanes - 1) / kLanes * kLanes;
  const int64_t block_stride = window.padded_outputs * kLanes;
  const bool taps_first = has_channel_runs(job.v, taps);
  fetch_row(job, output_block * kLanes, floats);
  const auto sum_at = [&](int64_t tap, int64_t input_block, int64_t r) {
    const float* at =
        sums + tap * window.tap_sums() + input_block * block_stride + (output_block * kLanes + r) * kLanes;
    Block sum = load(at);
    for (int64_t s = 1; s < window.wgrad_slices; ++s) sum = sum + load(at + s * window.gradient_size());
    return sum;
  };
  for (int64_t r = 0; r < kLanes; ++r) {
    float* row = scratch + r * padded;
    if (window.thin) {
      // Channels and taps in the order of the gathered rows, in the first of the rows that finishing has beside these.
      float* gathered = scratch + kLanes * padded;
      for (int64_t b = 0; b < window.wgrad_input_blocks; ++b) store(gathered + b * kLanes, sum_at(0, b, r));
      for_taps(window, [&](int64_t plane, int64_t depth) {
        for (int64_t c = 0; c < channels; ++c)
          row[taps_first ? plane * channels + c : c * taps + plane] = gathered[depth + c];
      });
      continue;
    }
    for (int64_t b = 0; b < window.source.channel_blocks; ++b) {
      const int64_t channel0 = b * kLanes, here = smaller(channels - channel0, kLanes);
      for (int64_t k = 0; k < taps && taps_first; ++k)
        copy_lanes(row + k * channels + channel0, sum_at(k, b, r), here);
      for (int64_t k0 = 0; k0 < taps && !taps_first; k0 += kLanes) {
        Block part[kLanes];
        const int64_t count = smaller(taps - k0, kLanes);
        for (int64_t k = 0; k < kLanes; ++k) part[k] = k < count ? sum_at(k0 + k, b, r) : zero();
        transpose(part);
        // What a whole Block overwrites beyond its taps is written later, unless a channel has more Blocks.
        for (int64_t i = 0; i < here; ++i) {
          float* target = row + (channel0 + i) * taps + k0;
          if (taps <= kLanes) store(target, part[i]);
          else copy_lanes(target, part[i], count);
        }
      }
    }
  }
  finish_rows(job, window.target.channels, {floats, padded}, 0, output_block, 1.0f, scratch, dbias, bias_gradient,
              bias_slices, scratch + kLanes * padded);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

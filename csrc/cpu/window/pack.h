// Parameters to banks, and banks of gradients back to parameters, for any number of taps: 16 rows of v by 16 entries at
// a time, transposed in registers.
//
//   v, one row:   [C][taps], or channels_last [taps][C]          bank:   [taps][output block][C][16 lanes]
#pragma once

#include "cpu/conv/finish_rows.h"
#include "cpu/conv/parameter_rows.h"
#include "cpu/vec/runs.h"
#include "cpu/window/window.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Entry e of a row of v: which input channel and tap it is.
class RowEntry {
 public:
  RowEntry(bool taps_first, int64_t channels, int64_t taps)
      : taps_first_(taps_first), end_(taps_first ? channels : taps) {}

  int64_t channel() const { return taps_first_ ? inner_ : outer_; }
  int64_t tap() const { return taps_first_ ? outer_ : inner_; }

  void advance() {
    if (++inner_ < end_) return;
    inner_ = 0;
    ++outer_;
  }

 private:
  bool taps_first_;
  int64_t end_, outer_ = 0, inner_ = 0;
};

WNFUSED_INLINE Block load_part(const float* source, int64_t lanes) {
  return lanes >= kLanes ? load(source) : load(source, lanes);
}

// One block of outputs, scaled, to `target`, where its part of the bank begins.
inline void pack_window(const Window& window, const Parameter& v, int64_t output_block,
                        const Block (&scale)[kLanes], float* target) {
  const int64_t floats = window.row_floats();
  const float* values = static_cast<const float*>(v.data) + output_block * kLanes * floats;
  for (int64_t share = 0; share < window.sharing; ++share, target += window.row_channels() * kLanes) {
    const auto [begin, end] = window.lanes_of(output_block, share);
    const bool all_rows = begin == 0 && end == kLanes;
    RowEntry entry(v.taps_first, window.row_channels(), window.row_taps());
    for (int64_t e = 0; e < floats; e += kLanes) {
      Block block[kLanes];
      const int64_t lanes = smaller(kLanes, floats - e);
      if (all_rows && lanes == kLanes) {
        WNFUSED_UNROLL for (int r = 0; r < kLanes; ++r) block[r] = load(values + r * floats + e) * scale[r];
      } else {
        for (int r = 0; r < kLanes; ++r)
          block[r] = begin <= r && r < end ? load_part(values + r * floats + e, lanes) * scale[r] : zero();
      }
      transpose(block);
      if (window.row_taps() == 1) {  // entries follow one another in the bank
        float* entries = target + window.bank_offset(0, e);
        for (int64_t i = 0; i < lanes; ++i) store(entries + i * kLanes, block[i]);
        continue;
      }
      for (int64_t i = 0; i < lanes; ++i, entry.advance())
        store(target + window.bank_offset(entry.tap(), entry.channel()), block[i]);
    }
  }
}

// The same, by the scales of rows whose norms are known.
template <class Job>
void pack_known_window(const Job& job, const Window& window, int64_t outputs, int64_t output_block, float* target) {
  Block scale[kLanes];
  known_scales(job, outputs, output_block, scale);
  pack_window(window, job.v, output_block, scale, target);
}

// Lanes [first, first + lanes) from a run, zeros beside them.
WNFUSED_INLINE Block load_lanes(const float* source, int64_t first, int64_t lanes) {
  if (first == 0) return load_part(source, lanes);
  float values[kLanes] = {};
  for (int64_t i = 0; i < lanes; ++i) values[first + i] = source[i];
  return load(values);
}

// One block of outputs, where the rows of v are the source's channels.
template <class Job>
void pack_transposed_window(const Job& job, const Window& window, int64_t input_block, float* block0) {
  const int64_t inputs = window.target.channels / window.groups, outputs = window.source.channels / window.groups;
  const int64_t taps = window.planes, floats = inputs * taps;
  const int64_t first_row = window.first_channel(input_block);
  const bool runs = job.v.taps_first || taps == 1;
  for (int64_t d = 0; d < window.depth; ++d) {
    const int64_t output = first_row + d;
    // The inputs of the row's group that are in this block: lanes from `begin` to `end`, from the group's input `at`
    // on.
    const auto [begin, end] = window.lanes_of(input_block, d / outputs);
    const int64_t at = input_block * kLanes + begin - output / outputs * inputs;
    const float* row = static_cast<const float*>(job.v.data) + output * floats;
    const Block scale = splat(row_scale(job, output));
    float* target = block0 + d * kLanes;
    if (runs) {
      for (int64_t k = 0; k < taps; ++k)
        store(target + k * window.plane_stride, load_lanes(row + k * inputs + at, begin, end - begin) * scale);
      continue;
    }
    for (int64_t k0 = 0; k0 < taps; k0 += kLanes) {
      Block block[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t first = (at + i - begin) * taps + k0;
        block[i] = begin <= i && i < end ? load_part(row + first, floats - first) : zero();
      }
      transpose(block);
      const int64_t count = smaller(kLanes, taps - k0);
      for (int64_t k = 0; k < count; ++k) store(target + (k0 + k) * window.plane_stride, block[k] * scale);
    }
  }
}

// What a bank of gradients has for an entry of sixteen rows, which stands at `source` for the first of the groups.
WNFUSED_INLINE Block load_entry(const Window& window, int64_t output_block, const float* source) {
  if (window.sharing == 1) return load(source);
  float values[kLanes];
  for (int64_t share = 0; share < window.sharing; ++share, source += window.row_channels() * kLanes) {
    const auto [begin, end] = window.lanes_of(output_block, share);
    for (int64_t r = begin; r < end; ++r) values[r] = source[r];
  }
  return load(values);
}

// dv, dg and, unless it is null, dbias of one output block, whose part of the first slice's bank begins at `bank`.
// window: the one whose weight gradient it is. `scratch`: kFinishRows rows of whole Blocks.
template <class Job>
void finish_window_gradient(const Job& job, const Window& window, int64_t output_block, const float* bank,
                            const Parameter& dbias, const float* bias_gradient, float* scratch) {
  const int64_t outputs = window.target.channels, floats = window.row_floats();
  const int64_t padded = (floats + kLanes - 1) / kLanes * kLanes;
  fetch_row(job, output_block * kLanes, floats);
  RowEntry entry(job.v.taps_first, window.row_channels(), window.row_taps());
  for (int64_t e = 0; e < floats; e += kLanes) {
    Block block[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      block[i] = zero();
      if (e + i >= floats) continue;
      const float* source = bank + window.bank_offset(entry.tap(), entry.channel());
      for (int64_t s = 0; s < window.wgrad_slices; ++s)
        block[i] = block[i] + load_entry(window, output_block, source + s * window.gradient_size());
      entry.advance();
    }
    transpose(block);
    WNFUSED_UNROLL for (int r = 0; r < kLanes; ++r) store(scratch + r * padded + e, block[r]);
  }
  finish_rows(job, outputs, {floats, padded}, 0, output_block, 1.0f, scratch, dbias, bias_gradient,
              window.wgrad_slices, scratch + kLanes * padded);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

// Parameters of depthwise layers to banks, and gradients back: 16 rows of v at a time, a row a lane, so that norms,
// scales and their gradients are sums and products of Blocks.
//
//   v    [row][taps]   ->   [tap][16 rows]
#pragma once

#include "cpu/conv/layer_job.h"
#include "cpu/depthwise/depthwise.h"
#include "cpu/layer/rows.h"
#include "cpu/window/pack.h"

namespace wnfused::cpu::WNFUSED_ISA {

// One number for each row of block `block`; 0 for rows that do not exist.
WNFUSED_INLINE Block load_rows(const Parameter& numbers, int64_t channels, int64_t block) {
  return load_part(static_cast<const float*>(numbers.data) + block * kLanes, channels - block * kLanes);
}

WNFUSED_INLINE void store_rows(float* numbers, int64_t channels, int64_t block, const Block& value) {
  const int64_t lanes = channels - block * kLanes;
  if (lanes >= kLanes) return store(numbers + block * kLanes, value);
  float values[kLanes];
  store(values, value);
  copy_lanes(numbers + block * kLanes, values, lanes);
}

// Rows of v, and of a gradient, by lanes.
class Rows16 {
 public:
  Rows16(int64_t channels, int64_t taps, int64_t block)
      : channels_(channels), taps_(taps), row0_(block * kLanes), rows_(smaller(kLanes, channels - row0_)) {}

  void load_from(const Parameter& v) {
    const float* values = static_cast<const float*>(v.data);
    for (int64_t e = 0; e < taps_; e += kLanes) {
      Block block[kLanes];
      for (int64_t r = 0; r < kLanes; ++r) {
        const int64_t at = (row0_ + r) * taps_ + e;
        // What a Block holds of the next row is in lanes of taps that do not exist.
        block[r] = r >= rows_ ? zero() : load_part(values + at, channels_ * taps_ - at);
      }
      transpose(block);
      WNFUSED_UNROLL for (int i = 0; i < kLanes; ++i) tap[e + i] = block[i];
    }
  }

  void store_to(const Parameter& dv) {
    float* values = static_cast<float*>(dv.data) + row0_ * taps_;
    float row[kLanes][kMaxWindowTaps];
    for (int64_t e = 0; e < taps_; e += kLanes) {
      Block block[kLanes];
      WNFUSED_UNROLL for (int i = 0; i < kLanes; ++i) block[i] = tap[e + i];
      transpose(block);
      WNFUSED_UNROLL for (int r = 0; r < kLanes; ++r) store(row[r] + e, block[r]);
    }
    for (int64_t r = 0; r < rows_; ++r) __builtin_memcpy(values + r * taps_, row[r], taps_ * sizeof(float));
  }

  Block norms() const {
    Block squares[4] = {zero(), zero(), zero(), zero()};
    for (int64_t k = 0; k < taps_; ++k) squares[k % 4] = multiply_add(tap[k], tap[k], squares[k % 4]);
    return square_root((squares[0] + squares[1]) + (squares[2] + squares[3]));
  }

  Block tap[kMaxWindowTaps];

 private:
  int64_t channels_, taps_, row0_, rows_;
};

// g / ||v|| of a block's rows; ones for a plain convolution, which has no g.
template <class Job>
WNFUSED_INLINE Block row_scales(const Job& job, int64_t block, const Block& norms) {
  return job.g.data ? ratio(load_rows(job.g, job.output.channels, block), norms) : splat(1.0f);
}

// The norms of a block's rows.
inline void measure_rows(const Parameter& v, int64_t channels, int64_t taps, int64_t block, float* norm) {
  Rows16 rows(channels, taps, block);
  rows.load_from(v);
  store_rows(norm, channels, block, rows.norms());
}

WNFUSED_INLINE void pack_rows(const Depthwise& layer, const Rows16& rows, const Block& scale, int64_t block,
                              float* bank) {
  for (int64_t k = 0; k < layer.planes; ++k)
    store(bank + k * layer.plane_stride + block * kLanes, rows.tap[k] * scale);
}

// One block of the bank, and of the norms unless that is null.
inline void pack_rows(const ConvForward<Depthwise>& job, int64_t block, const Bank& bank, float* norm) {
  const int64_t channels = job.output.channels;
  Rows16 rows(channels, job.geometry.planes, block);
  rows.load_from(job.v);
  const Block norms = rows.norms();
  if (norm) store_rows(norm, channels, block, norms);
  pack_rows(job.geometry, rows, row_scales(job, block, norms), block, bank.weights);
  store(bank.bias + block * kLanes, job.bias.data ? load_rows(job.bias, channels, block) : zero());
}

// The norms of a block's rows, from the forward; zeros for a plain convolution.
inline Block known_norms(const ConvBackward<Depthwise>& job, int64_t block) {
  const Parameter norms{const_cast<float*>(job.norm), false};
  return job.norm ? load_rows(norms, job.output.channels, block) : zero();
}

// The same for the data gradient.
inline void pack_rows(const ConvBackward<Depthwise>& job, int64_t block, const Bank& bank) {
  const int64_t channels = job.output.channels;
  Rows16 rows(channels, job.geometry.planes, block);
  rows.load_from(job.v);
  pack_rows(job.back, rows, row_scales(job, block, known_norms(job, block)), block, bank.weights);
}

// dv, dg and, unless it is null, dbias of one block, from the slices' sums.
inline void finish_block(const ConvBackward<Depthwise>& job, int64_t block) {
  const Depthwise& layer = job.geometry;
  const int64_t channels = job.output.channels, lane = block * kLanes;
  Rows16 v(channels, layer.planes, block), gradient(channels, layer.planes, block);
  v.load_from(job.v);
  const Block norms = known_norms(job, block);
  // <dw, v> could overflow where <dw, v / ||v||> does not.
  const Block unit = ratio(splat(1.0f), norms);
  Block dot = zero(), poison = zero();
  for (int64_t k = 0; k < layer.planes; ++k) {
    Block sum = zero();
    for (int64_t s = 0; s < layer.wgrad_slices; ++s)
      sum = sum + load(job.scratch.gradient[0] + s * layer.gradient_size() + k * layer.plane_stride + lane);
    gradient.tap[k] = sum;
    v.tap[k] = v.tap[k] * unit;
    dot = multiply_add(sum, v.tap[k], dot);
    poison = multiply_add(sum, zero(), poison);
  }
  // Both are 0 for a row of zeros.
  const Block scale = row_scales(job, block, norms);
  for (int64_t k = 0; k < layer.planes; ++k)
    gradient.tap[k] = layer.planes == 1 ? single_gradient(gradient.tap[k])
                                        : scale * multiply_add(-dot, v.tap[k], gradient.tap[k]);
  poison = multiply_add(dot, zero(), poison);
  if (job.dg.data) store_rows(static_cast<float*>(job.dg.data), channels, block, dot);
  gradient.store_to(job.dv);
  if (job.dbias.data) {
    Block sum = zero();
    for (int64_t s = 0; s < layer.wgrad_slices; ++s)
      sum = sum + load(job.scratch.bias_gradient[0] + s * layer.padded_outputs + lane);
    store_rows(static_cast<float*>(job.dbias.data), channels, block, sum);
    poison = multiply_add(sum, zero(), poison);
  }
  if (sum_of(poison) != 0.0f) job.poisoned->store(true, std::memory_order_relaxed);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

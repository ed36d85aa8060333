// The parameters of layers and stages, float or bfloat16: entries, row norms, and the scales g / ||v|| of rows.
#pragma once

#include "cpu/conv/memory.h"
#include "cpu/vec/vec.h"

namespace wnfused::cpu::WNFUSED_ISA {

inline float read(const Parameter& parameter, int64_t index) {
  return parameter.bfloat16 ? from_bfloat16(static_cast<const uint16_t*>(parameter.data)[index])
                            : static_cast<const float*>(parameter.data)[index];
}

inline void write(const Parameter& parameter, int64_t index, float value) {
  if (parameter.bfloat16) static_cast<uint16_t*>(parameter.data)[index] = to_bfloat16(value);
  else static_cast<float*>(parameter.data)[index] = value;
}

inline void read_run(const Parameter& parameter, int64_t index, int64_t count, float* target) {
  if (!parameter.bfloat16) {
    __builtin_memcpy(target, static_cast<const float*>(parameter.data) + index, count * sizeof(float));
    return;
  }
  const uint16_t* source = static_cast<const uint16_t*>(parameter.data) + index;
  for (int64_t i = 0; i < count; ++i) target[i] = from_bfloat16(source[i]);
}

// `source` is whole Blocks.
inline void write_run(const Parameter& parameter, int64_t index, int64_t count, const float* source) {
  if (!parameter.bfloat16) {
    __builtin_memcpy(static_cast<float*>(parameter.data) + index, source, count * sizeof(float));
    return;
  }
  uint16_t* target = static_cast<uint16_t*>(parameter.data) + index;
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) store(target + k, load(source + k));
  for (; k < count; ++k) target[k] = to_bfloat16(source[k]);
}

WNFUSED_INLINE float value_of(float entry) { return entry; }
WNFUSED_INLINE float value_of(uint16_t entry) { return from_bfloat16(entry); }

// The squares of one row of v, `floats` long, summed up lane by lane.
template <class T>
Block row_squares(const T* values, int64_t floats) {
  Block squares[4] = {zero(), zero(), zero(), zero()};
  int64_t k = 0;
  for (; k + 4 * kLanes <= floats; k += 4 * kLanes)
    WNFUSED_UNROLL for (int i = 0; i < 4; ++i) {
      const Block value = load(values + k + i * kLanes);
      squares[i] = multiply_add(value, value, squares[i]);
    }
  for (; k + kLanes <= floats; k += kLanes) {
    const Block value = load(values + k);
    squares[0] = multiply_add(value, value, squares[0]);
  }
  if (k < floats) {
    float rest[kLanes] = {};
    for (int64_t i = 0; k + i < floats; ++i) rest[i] = value_of(values[k + i]);
    squares[1] = multiply_add(load(rest), load(rest), squares[1]);
  }
  return (squares[0] + squares[1]) + (squares[2] + squares[3]);
}

// The norms of one output block's rows of v, all at once; 0 of absent rows.
inline Block block_norms(const Parameter& v, int64_t outputs, int64_t floats, int64_t convolution,
                         int64_t output_block) {
  const int64_t first = convolution * outputs + output_block * kLanes;
  const int64_t rows = smaller(outputs - output_block * kLanes, kLanes);
  Block squares[kLanes];
  for (int64_t r = 0; r < kLanes; ++r) {
    if (r >= rows) squares[r] = zero();
    else if (v.bfloat16) squares[r] = row_squares(static_cast<const uint16_t*>(v.data) + (first + r) * floats, floats);
    else squares[r] = row_squares(static_cast<const float*>(v.data) + (first + r) * floats, floats);
  }
  return square_root(sums_of(squares));
}

inline void store_norms(const Block& norms, int64_t outputs, int64_t convolution, int64_t output_block, float* norm) {
  float entries[kLanes];
  store(entries, norms);
  const int64_t rows = smaller(outputs - output_block * kLanes, kLanes);
  __builtin_memcpy(norm + convolution * outputs + output_block * kLanes, entries, rows * sizeof(float));
}

// The norms of one output block's rows.
inline void measure_norms(const Parameter& v, int64_t outputs, int64_t floats, int64_t convolution,
                          int64_t output_block, float* norm) {
  store_norms(block_norms(v, outputs, floats, convolution, output_block), outputs, convolution, output_block, norm);
}

// g / ||v|| of a row; 0 for a row of zeros, and 1 for every row of a plain convolution, which has no g.
template <class Job>
WNFUSED_INLINE float row_scale(const Job& job, int64_t row, float norm) {
  return job.g.data ? ratio(read(job.g, row), norm) : 1.0f;
}

// The same scale, of a row whose norm is known.
template <class Job>
WNFUSED_INLINE float row_scale(const Job& job, int64_t row) {
  return row_scale(job, row, job.norm ? job.norm[row] : 0.0f);
}

// The scales of one block's rows of v, whose norms are known.
template <class Job>
void known_scales(const Job& job, int64_t rows, int64_t block, Block (&scale)[kLanes]) {
  for (int64_t r = 0; r < kLanes; ++r) {
    const int64_t row = block * kLanes + r;
    scale[r] = splat(row < rows ? row_scale(job, row) : 0.0f);
  }
}

// g / ||v|| of one output block's rows, lane by lane, and their bias and, unless that is null, their norms; zeros for
// absent rows.
template <class Job>
Block measure_scales(const Job& job, int64_t outputs, int64_t floats, int64_t convolution, int64_t output_block,
                     float* bias, float* norm) {
  const Block norms = job.g.data ? block_norms(job.v, outputs, floats, convolution, output_block) : splat(1.0f);
  if (norm) store_norms(norms, outputs, convolution, output_block, norm);
  float gains[kLanes];
  for (int64_t r = 0; r < kLanes; ++r) {
    const int64_t channel = output_block * kLanes + r, index = convolution * outputs + channel;
    const bool present = channel < outputs;
    gains[r] = !present ? 0.0f : job.g.data ? read(job.g, index) : 1.0f;
    bias[channel] = present && job.bias.data ? read(job.bias, index) : 0.0f;
  }
  return ratio(load(gains), norms);
}

// Each lane by itself.
WNFUSED_INLINE void splat_lanes(const Block& lanes, Block (&splats)[kLanes]) {
  float entries[kLanes];
  store(entries, lanes);
  for (int r = 0; r < kLanes; ++r) splats[r] = splat(entries[r]);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

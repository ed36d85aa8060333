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

// The norm of one row of v, `floats` long.
template <class T>
float row_norm(const T* values, int64_t floats) {
  Block squares[4] = {zero(), zero(), zero(), zero()};
  int64_t k = 0;
  for (; k + 4 * kLanes <= floats; k += 4 * kLanes)
    WNFUSED_UNROLL for (int i = 0; i < 4; ++i) {
      const Block value = load(values + k + i * kLanes);
      squares[i] = multiply_add(value, value, squares[i]);
    }
  float rest = 0.0f;
  for (; k + kLanes <= floats; k += kLanes) {
    const Block value = load(values + k);
    squares[0] = multiply_add(value, value, squares[0]);
  }
  for (; k < floats; ++k) rest += value_of(values[k]) * value_of(values[k]);
  return __builtin_sqrtf(sum_of((squares[0] + squares[1]) + (squares[2] + squares[3])) + rest);
}

inline float row_norm(const Parameter& v, int64_t floats, int64_t row) {
  if (v.bfloat16) return row_norm(static_cast<const uint16_t*>(v.data) + row * floats, floats);
  return row_norm(static_cast<const float*>(v.data) + row * floats, floats);
}

// The norms of one output block's rows.
inline void measure_norms(const Parameter& v, int64_t outputs, int64_t floats, int64_t convolution,
                          int64_t output_block, float* norm) {
  const int64_t end = smaller((output_block + 1) * kLanes, outputs);
  for (int64_t channel = output_block * kLanes; channel < end; ++channel) {
    const int64_t index = convolution * outputs + channel;
    norm[index] = row_norm(v, floats, index);
  }
}

// g / ||v|| of a row; 0 for a row of zeros, and 1 for every row of a plain convolution, which has no g.
template <class Job>
WNFUSED_INLINE float row_scale(const Job& job, int64_t row, float norm) {
  if (!job.g.data) return 1.0f;
  return norm != 0.0f ? read(job.g, row) / norm : 0.0f;
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

// g / ||v|| and the bias of one output block's rows, and their norms unless that is null; zeros for absent rows.
template <class Job>
void measure_scales(const Job& job, int64_t outputs, int64_t floats, int64_t convolution, int64_t output_block,
                    float* bias, float* norm, Block (&scale)[kLanes]) {
  for (int64_t r = 0; r < kLanes; ++r) {
    const int64_t channel = output_block * kLanes + r, index = convolution * outputs + channel;
    const bool present = channel < outputs;
    const float length = present && job.g.data ? row_norm(job.v, floats, index) : 0.0f;
    scale[r] = splat(present ? row_scale(job, index, length) : 0.0f);
    bias[channel] = present && job.bias.data ? read(job.bias, index) : 0.0f;
    if (present && norm) norm[index] = length;
  }
}

}  // namespace wnfused::cpu::WNFUSED_ISA

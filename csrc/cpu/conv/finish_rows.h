// Weight normalisation's backward, row by row, from a row of dW and one of v:
//
//   dg = <dW, v> / ||v||,   dv = g / ||v|| (dW - v dg / ||v||)
//
// A plain convolution, which has no g, has dv = dW.
#pragma once

#include <algorithm>

#include "cpu/conv/division.h"
#include "cpu/conv/parameter_rows.h"
#include "cpu/vec/prefetch.h"

namespace wnfused::cpu::WNFUSED_ISA {

// A row of v is `floats` long; rows in scratch memory are padded to whole Blocks.
struct RowLength {
  int64_t floats, padded;
};

// dv and dg of one row, from dW of that row. Row and gradient are padded with zeros.
template <class Job>
void normalise_gradient(const Job& job, int64_t index, const RowLength& length, const float* weight_gradient,
                        const float* row, float factor, float* result) {
  const int64_t floats = length.floats, padded = length.padded;  // no binding: a lambda of C++17 captures none
  const float norm = job.norm[index];
  float dg = 0.0f, scale = 0.0f;
  // <dW, v> could overflow where <dW, v / ||v||> does not.
  const Block unit = splat(norm != 0.0f ? 1.0f / norm : 0.0f);
  if (norm != 0.0f) {
    Block dot[4] = {zero(), zero(), zero(), zero()};
    for (int64_t k = 0, i = 0; k < padded; k += kLanes, ++i)
      dot[i % 4] = multiply_add(load(weight_gradient + k), load(row + k) * unit, dot[i % 4]);
    dg = factor * sum_of((dot[0] + dot[1]) + (dot[2] + dot[3]));
    scale = read(job.g, index) / norm;
  }
  write(job.dg, index, dg);
  if (dg - dg != 0.0f) job.poisoned->store(true, std::memory_order_relaxed);
  const bool in_place = !job.dv.bfloat16 && floats == padded;
  float* target = in_place ? static_cast<float*>(job.dv.data) + index * floats : result;
  const Block projection = splat(-dg);
  const Block scales = splat(scale), factors = splat(factor);
  const auto put_row = [&](const auto& put) {
    for (int64_t k = 0; k < padded; k += kLanes)
      put(target + k, scales * multiply_add(load(row + k) * unit, projection, load(weight_gradient + k) * factors));
  };
  if (in_place && job.dv.past_caches && is_aligned(target))
    put_row([](float* to, const Block& block) { store_past_caches(to, block); });
  else
    put_row([](float* to, const Block& block) { store(to, block); });
  if (floats == 1) target[0] = weight_gradient[0] * 0.0f;  // as single_gradient (layer/rows.h) has it
  // A zero row has zero gradients even where dW is not finite.
  if (norm == 0.0f)
    for (int64_t k = 0; k < padded; ++k) target[k] = 0.0f;
  if (in_place) return;
  write_run(job.dv, index * floats, floats, result);
}

// dv of one row of a plain convolution, which is dW, whatever v holds.
template <class Job>
void copy_gradient(const Job& job, int64_t index, const RowLength& length, const float* weight_gradient) {
  Block nothing = zero();
  for (int64_t k = 0; k < length.padded; k += kLanes)
    nothing = multiply_add(load(weight_gradient + k), zero(), nothing);
  if (sum_of(nothing) != 0.0f) job.poisoned->store(true, std::memory_order_relaxed);
  write_run(job.dv, index * length.floats, length.floats, weight_gradient);
}

// A row of v, and of its gradient, ahead of normalise_gradient.
template <class Job>
void fetch_row(const Job& job, int64_t index, int64_t floats) {
  if (!job.v.bfloat16)
    for (int64_t k = 0; k < floats; k += kLanes)
      __builtin_prefetch(static_cast<const float*>(job.v.data) + index * floats + k);
  if (!job.dv.bfloat16 && !job.dv.past_caches)
    for (int64_t k = 0; k < floats; k += kLanes)
      prefetch_for_writing(static_cast<float*>(job.dv.data) + index * floats + k);
}

// One block of the bias gradient, from the sums of `count` runs.
inline void finish_bias(const Parameter& dbias, const MapShape& map, int64_t count, const float* sums, int64_t block) {
  Block sum = zero();
  for (int64_t i = 0; i < count; ++i) sum = sum + load(sums + i * map.padded_channels + block * kLanes);
  float values[kLanes];
  store(values, sum);
  const int64_t channels = smaller(kLanes, map.channels - block * kLanes);
  for (int64_t i = 0; i < channels; ++i) write(dbias, block * kLanes + i, values[i]);
}

// dv, dg and, unless it is null, dbias of one output block, from dW of its rows, which are in `gradients`. The first
// row has been fetched.
// `scratch`: 2 rows.
template <class Job>
void finish_rows(const Job& job, int64_t outputs, const RowLength& length, int64_t convolution, int64_t output_block,
                 float factor, float* gradients, const Parameter& dbias, const float* bias_gradient, int64_t slices,
                 float* scratch) {
  const int64_t floats = length.floats, padded = length.padded;  // no binding: a lambda of C++17 captures none
  const int64_t padded_outputs = (outputs + kLanes - 1) / kLanes * kLanes;
  for (int64_t r = 0; r < kLanes && output_block * kLanes + r < outputs; ++r) {
    const int64_t channel = output_block * kLanes + r, index = convolution * outputs + channel;
    const float* values = scratch;
    if (r + 1 < kLanes && channel + 1 < outputs) fetch_row(job, index + 1, floats);
    if (!job.v.bfloat16 && floats == padded) {
      values = static_cast<const float*>(job.v.data) + index * floats;
    } else {
      read_run(job.v, index * floats, floats, scratch);
      for (int64_t k = floats; k < padded; ++k) scratch[k] = gradients[r * padded + k] = 0.0f;
    }
    if (job.g.data) normalise_gradient(job, index, length, gradients + r * padded, values, factor, scratch + padded);
    else copy_gradient(job, index, length, gradients + r * padded);
    if (!dbias.data) continue;
    float sum = 0.0f;
    for (int64_t s = 0; s < slices; ++s) sum += bias_gradient[s * padded_outputs + channel];
    write(dbias, index, factor * sum);
    if (sum - sum != 0.0f) job.poisoned->store(true, std::memory_order_relaxed);
  }
  if (job.dv.past_caches) end_stores_past_caches();
}

}  // namespace wnfused::cpu::WNFUSED_ISA

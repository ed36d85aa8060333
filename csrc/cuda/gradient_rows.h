// The end of a weight gradient: from rows of dw to dv, dg and dbias.
//
//   dg = <dw, v> / ||v||,   dv = (g / ||v||) (dw - v dg / ||v||),   zeros for a zero row
#pragma once

#include "cuda/memory.h"

namespace wnfused::gpu {

struct GradientParams {
  const char* inputs;     // operands of all convolutions, [convs, images, H, W, C]
  const char* gradients;  // gradients of their outputs, likewise
  Values v, g;
  const float* norm;
  Values dv, dg, dbias;
  float* partial;  // [slices, convs, C, 9 C + 1]: sums of each slice of the batch; null where there is one slice
  int convs, images, slices;
};

// The values of a row as a warp shares them: body(j, q) for value q = 32 j + lane. kAtOnce: how many are on their way.
template <int kRowSize, int kAtOnce = (kRowSize + 31) / 32, class Body>
WNFUSED_DEVICE void for_each_value(const Body& body) {
#pragma unroll kAtOnce
  for (int j = 0; j < (kRowSize + 31) / 32; ++j) {
    const int q = j * 32 + lane_index();
    if (q < kRowSize) body(j, q);
  }
}

// Ends row `row` of all convolutions; value(j, q) gives its dw.
template <int kRowSize, int kAtOnce, class Value>
WNFUSED_DEVICE void store_row(const GradientParams& params, int64_t row, const Value& value, float bias_gradient) {
  float along = 0.0f;
  for_each_value<kRowSize, kAtOnce>(
      [&](int j, int q) { along += value(j, q) * load_value(params.v, row * kRowSize + q); });
  along = warp_sum(along);
  const float norm = load_global<float>(params.norm + row);
  const bool zero = norm == 0.0f;
  const float inverse = zero ? 0.0f : 1.0f / norm, gain_gradient = zero ? 0.0f : along * inverse;
  const float scale = load_value(params.g, row) * inverse, unit = gain_gradient * inverse;
  for_each_value<kRowSize, kAtOnce>([&](int j, int q) {
    const float across = value(j, q) - unit * load_value(params.v, row * kRowSize + q);
    store_value(params.dv, row * kRowSize + q, zero ? 0.0f : scale * across);
  });
  if (lane_index() == 0) {
    store_value(params.dg, row, gain_gradient);
    store_value(params.dbias, row, bias_gradient);
  }
}

// Sums the slices of every row in their order: one warp a row.
template <int kChannels>
struct GradientSumKernel {
  using Params = GradientParams;
  static constexpr int kThreads = 256, kSharedBytes = 0, kBlocksPerMultiprocessor = 2;
  static constexpr int kRows = kThreads / 32, kRowSize = kChannels * 9;

  WNFUSED_DEVICE static void run(const Params& params, char*) {
    const int64_t row = static_cast<int64_t>(block_index()) * kRows + thread_index() / 32;
    if (row >= static_cast<int64_t>(params.convs) * kChannels) return;
    float sums[(kRowSize + 31) / 32] = {}, bias_sum = 0.0f;
    for (int slice = 0; slice < params.slices; ++slice) {
      const float* from =
          params.partial + (static_cast<int64_t>(slice) * params.convs * kChannels + row) * (kRowSize + 1);
      for_each_value<kRowSize>([&](int j, int q) { sums[j] += load_global<float>(from + q); });
      bias_sum += load_global<float>(from + kRowSize);
    }
    store_row<kRowSize, (kRowSize + 31) / 32>(params, row, [&](int j, int) { return sums[j]; }, bias_sum);
  }
};

}  // namespace wnfused::gpu

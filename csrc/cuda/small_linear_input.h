// dx = (s mask dy) v (small_linear.h).
#pragma once

#include "cuda/small_linear.h"

namespace wnfused::gpu {

// kTiles: of 16 samples. Warps walk the rows of v, 16 at a time each: a lane takes four neighbouring rows, two
// neighbouring entries of each, and dy of two samples in each tile at these rows.
template <class Kind, class T, class N, int kTiles>
struct SmallLinearInputGradient {
  using Params = SmallLinearParams<T, N>;
  static constexpr int kWarps = kTiles == 1 ? 16 : 8, kThreads = 32 * kWarps, kColumns = 16, kSamples = 16 * kTiles,
                       kStep = 16;
  static constexpr int kSharedBytes = kWarps * kSamples * kColumns * 4, kBlocksPerMultiprocessor = 1;

  WNFUSED_HOST_DEVICE static int column_blocks(int columns) { return (columns + kColumns - 1) / kColumns; }
  static int64_t blocks(const Params& params) {
    return int64_t{column_blocks(params.columns)} * ((params.samples + kSamples - 1) / kSamples);
  }

  WNFUSED_DEVICE static void run(const Params& params, char* shared) {
    const int columns = column_blocks(params.columns);
    const int first_column = block_index() % columns * kColumns, first_sample = block_index() / columns * kSamples;
    products(params, first_column, first_sample, shared);
    block_barrier();
    for (int i = thread_index(); i < kSamples * kColumns; i += kThreads)
      write(params, first_sample + i / kColumns, first_column + i % kColumns, i, shared);
  }

 private:
  struct Operands {
    Neighbours<T, 2> v[4];
    Neighbours<T, 4> g;
    Neighbours<float, 4> norm;
    MaskedGradient<T, N> dz[2 * kTiles];
  };

  WNFUSED_DEVICE static void products(const Params& params, int first_column, int first_sample, char* shared) {
    const int warp = thread_index() / 32, lane = lane_index(), group = lane / 4, t = lane % 4;
    const int column = first_column + 2 * group;
    const auto load = [&](int start) {
      const int row = start + 4 * t;
      const bool inside = row < params.rows;
      Operands read;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        read.v[i] = Neighbours<T, 2>::load(params.v + static_cast<int64_t>(row + i) * params.columns + column,
                                           inside && column < params.columns);
      read.g = Neighbours<T, 4>::load(params.g + row, inside);
      read.norm = Neighbours<float, 4>::load(params.norm + row, inside);
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i)
        read.dz[i] = MaskedGradient<T, N>::load(params, first_sample + 8 * i + group, row);
      return read;
    };
    float sums[kTiles][2][4] = {};
    Operands next = load(warp * kStep);
#pragma unroll 1
    for (int start = warp * kStep; start < params.rows; start += kWarps * kStep) {
      const Operands now = next;
      next = load(start + kWarps * kStep);
      float scale[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) scale[i] = row_scale(now.g[i], now.norm[i]);
      const auto scaled = [&](const MaskedGradient<T, N>& dz) {
        return Quad<Kind>::of(scale[0] * dz.at(params, 0), scale[1] * dz.at(params, 1), scale[2] * dz.at(params, 2),
                              scale[3] * dz.at(params, 3));
      };
      const Quad<Kind> left = quad_across<Kind>(now.v, 0), right = quad_across<Kind>(now.v, 1);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const Quad<Kind> upper = scaled(now.dz[2 * i]), lower = scaled(now.dz[2 * i + 1]);
        multiply_quads(sums[i][0], upper, lower, left);
        multiply_quads(sums[i][1], upper, lower, right);
      }
    }
    // [warp][sample][column]
    char* own = shared + warp * kSamples * kColumns * 4;
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int side = 0; side < 2; ++side)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          store_shared(own + ((16 * i + group + c / 2 * 8) * kColumns + 2 * (2 * t + c % 2) + side) * 4,
                       sums[i][side][c]);
  }

  WNFUSED_DEVICE static void write(const Params& params, int sample, int column, int place, const char* shared) {
    if (sample >= params.samples || column >= params.columns) return;
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp)
      sum += load_shared<float>(shared + (warp * kSamples * kColumns + place) * 4);
    if (!is_finite(sum)) sum = plain_product(params, sample, column);
    store_global(params.dx + static_cast<int64_t>(sample) * params.columns + column, narrow<N>(sum));
  }

  WNFUSED_DEVICE static float plain_product(const Params& params, int sample, int column) {
    float sum = 0.0f;
    for (int row = 0; row < params.rows && sum == sum; row += 4) {
      const auto dz = MaskedGradient<T, N>::load(params, sample, row);
      for (int i = 0; i < 4; ++i) {
        const float scale =
            row_scale(widen(load_global<T>(params.g + row + i)), load_global<float>(params.norm + row + i));
        const float v = widen(load_global<T>(params.v + static_cast<int64_t>(row + i) * params.columns + column));
        sum += dz.at(params, i) * (scale * v);
      }
    }
    return sum;
  }
};

template <class Kind, class T, class N>
Status enqueue_small_linear_input(const SmallLinearParams<T, N>& params, Queue queue) {
  return enqueue_by_samples<SmallLinearInputGradient<Kind, T, N, 1>, SmallLinearInputGradient<Kind, T, N, 2>>(params,
                                                                                                              queue);
}

}  // namespace wnfused::gpu

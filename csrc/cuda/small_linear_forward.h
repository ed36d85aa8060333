// y = act(s (x v^T) + b + r) and the norms of v (small_linear.h).
#pragma once

#include "cuda/small_linear.h"

namespace wnfused::gpu {

// kTiles: of 16 samples. Warps walk the columns, 32 at a time each: a lane takes eight neighbouring entries of a row of
// v, and of two samples in each tile.
template <class Kind, class T, class N, int kTiles>
struct SmallLinearForward {
  using Params = SmallLinearParams<T, N>;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps, kRows = 8, kSamples = 16 * kTiles, kStep = 32;
  static constexpr int kSquaresAt = kWarps * kSamples * kRows * 4, kNormsAt = kSquaresAt + kWarps * 32 * 4;
  static constexpr int kSharedBytes = kNormsAt + kRows * 4, kBlocksPerMultiprocessor = kTiles == 1 ? 2 : 1;
  static_assert(kWarps == kRows, "a warp sums the squares of one row");

  WNFUSED_HOST_DEVICE static int row_blocks(int rows) { return (rows + kRows - 1) / kRows; }
  static int64_t blocks(const Params& params) {
    return int64_t{row_blocks(params.rows)} * ((params.samples + kSamples - 1) / kSamples);
  }

  WNFUSED_DEVICE static void run(const Params& params, char* shared) {
    const int rows = row_blocks(params.rows);
    const int first_row = block_index() % rows * kRows, first_sample = block_index() / rows * kSamples;
    products(params, first_row, first_sample, shared);
    block_barrier();
    const int warp = thread_index() / 32, lane = lane_index();
    // Lane 4 w + t finds what lane t of this row found in warp w.
    const int part = lane / 4 * 32 + warp * 4 + lane % 4;
    const float norm = square_root(warp_sum(load_shared<float>(shared + kSquaresAt + part * 4)));
    if (lane == 0) {
      store_shared(shared + kNormsAt + warp * 4, norm);
      if (first_sample == 0 && first_row + warp < params.rows) store_global(params.norm + first_row + warp, norm);
    }
    block_barrier();
    for (int i = thread_index(); i < kSamples * kRows; i += kThreads)
      write(params, first_sample + i / kRows, first_row + i % kRows, i, shared);
  }

 private:
  struct Operands {
    Neighbours<T, 8> v;
    Neighbours<N, 8> x[2 * kTiles];
  };

  // This warp's part of the products and of the squares, to shared memory.
  WNFUSED_DEVICE static void products(const Params& params, int first_row, int first_sample, char* shared) {
    const int warp = thread_index() / 32, lane = lane_index(), group = lane / 4, t = lane % 4;
    const int row = first_row + group;
    const auto load = [&](int start) {
      const int column = start + 8 * t;
      const bool inside = column < params.columns;
      Operands read;
      read.v = Neighbours<T, 8>::load(params.v + static_cast<int64_t>(row) * params.columns + column,
                                      inside && row < params.rows);
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        const int sample = first_sample + 8 * i + group;
        read.x[i] = Neighbours<N, 8>::load(params.x + static_cast<int64_t>(sample) * params.columns + column,
                                           inside && sample < params.samples);
      }
      return read;
    };
    float sums[kTiles][4] = {}, squares = 0.0f;
    Operands next = load(warp * kStep);
#pragma unroll 1
    for (int start = warp * kStep; start < params.columns; start += kWarps * kStep) {
      const Operands now = next;
      next = load(start + kWarps * kStep);
#pragma unroll
      for (int k = 0; k < 8; ++k) squares += now.v[k] * now.v[k];
#pragma unroll
      for (int half = 0; half < 8; half += 4) {
        const Quad<Kind> v = quad_of<Kind>(now.v, half);
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
          multiply_quads(sums[i], quad_of<Kind>(now.x[2 * i], half), quad_of<Kind>(now.x[2 * i + 1], half), v);
      }
    }
    // [warp][sample][row]
    char* own = shared + warp * kSamples * kRows * 4;
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        store_shared(own + ((16 * i + group + c / 2 * 8) * kRows + 2 * t + c % 2) * 4, sums[i][c]);
    store_shared(shared + kSquaresAt + (warp * 32 + lane) * 4, squares);
  }

  WNFUSED_DEVICE static void write(const Params& params, int sample, int row, int place, const char* shared) {
    if (sample >= params.samples || row >= params.rows) return;
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += load_shared<float>(shared + (warp * kSamples * kRows + place) * 4);
    const float norm = load_shared<float>(shared + kNormsAt + place % kRows * 4);
    const float scale = row_scale(widen(load_global<T>(params.g + row)), norm);
    float value = is_finite(sum) ? sum * scale : plain_product(params, sample, row, scale);
    if (params.bias)
      value += params.bias_is_float ? load_global<float>(static_cast<const float*>(params.bias) + row)
                                    : widen(load_global<N>(static_cast<const N*>(params.bias) + row));
    const int64_t at = static_cast<int64_t>(sample) * params.rows + row;
    if (params.residual) value += widen(load_global<N>(params.residual + at));
    store_global(params.y + at, narrow<N>(params.activates ? activated(value, params.slope) : value));
  }

  WNFUSED_DEVICE static float plain_product(const Params& params, int sample, int row, float scale) {
    const N* x = params.x + static_cast<int64_t>(sample) * params.columns;
    const T* v = params.v + static_cast<int64_t>(row) * params.columns;
    float sum = 0.0f;
    for (int k = 0; k < params.columns && sum == sum; ++k)
      sum += widen(load_global<N>(x + k)) * (scale * widen(load_global<T>(v + k)));
    return sum;
  }
};

template <class Kind, class T, class N>
Status enqueue_small_linear(const SmallLinearParams<T, N>& params, Queue queue) {
  return enqueue_by_samples<SmallLinearForward<Kind, T, N, 1>, SmallLinearForward<Kind, T, N, 2>>(params, queue);
}

}  // namespace wnfused::gpu

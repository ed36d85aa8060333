// y = act(s (x v^T) + b + r) and the norms of v (small_linear.h).
#pragma once

#include "cuda/small_linear.h"

namespace wnfused::gpu {

// kTiles: of 16 samples. Warps walk the columns, 32 at a time each: a lane takes eight neighbouring entries of a row of
// v, and of two samples in each tile. It asks for those of kAhead steps before it multiplies the first, and before them
// for what the thread will make an entry of y with.
template <class Kind, class T, class N, int kTiles>
struct SmallLinearForward {
  using Params = SmallLinearParams<T, N>;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps, kRows = 8, kSamples = 16 * kTiles, kStep = 32;
  static constexpr int kSquaresAt = kWarps * kSamples * kRows * 4, kNormsAt = kSquaresAt + kWarps * 32 * 4;
  // As many as leave room for two blocks a multiprocessor, 128 registers a thread: with four steps of float entries,
  // and one block, layers of more blocks than multiprocessors became slower.
  static constexpr int kAhead = Kind::kIsBfloat16 ? 4 : Kind::kPrecision == Precision::kFloat32 && kTiles == 2 ? 1 : 2;
  static constexpr int kSharedBytes = kNormsAt + kRows * 4, kBlocksPerMultiprocessor = 2;
  static_assert(kWarps == kRows, "a warp sums the squares of one row");
  static_assert(kSamples * kRows <= kThreads, "a thread writes one sum");

  WNFUSED_HOST_DEVICE static int row_blocks(int rows) { return (rows + kRows - 1) / kRows; }
  static int64_t blocks(const Params& params) {
    return int64_t{row_blocks(params.rows)} * ((params.samples + kSamples - 1) / kSamples);
  }

  WNFUSED_DEVICE static void run(const Params& params, char* shared) {
    const int rows = row_blocks(params.rows);
    const int first_row = block_index() % rows * kRows, first_sample = block_index() / rows * kSamples;
    const int warp = thread_index() / 32, lane = lane_index(), i = thread_index();
    const int sample = first_sample + i / kRows, row = first_row + i % kRows;
    const bool writes = i < kSamples * kRows && sample < params.samples && row < params.rows;
    const auto added = Added::load(params, sample, row, writes);
    products(params, first_row, first_sample, shared);
    block_barrier();
    // Lane 4 w + t finds what lane t of this row found in warp w.
    const int part = lane / 4 * 32 + warp * 4 + lane % 4;
    const float norm = square_root(warp_sum(load_shared<float>(shared + kSquaresAt + part * 4)));
    if (lane == 0) {
      store_shared(shared + kNormsAt + warp * 4, norm);
      if (first_sample == 0 && first_row + warp < params.rows) store_global(params.norm + first_row + warp, norm);
    }
    block_barrier();
    if (writes) write(params, sample, row, added, shared);
  }

 private:
  struct Operands {
    Neighbours<T, 8> v;
    Neighbours<N, 8> x[2 * kTiles];
  };

  // What makes an entry of y of its sum, as it lies in memory: to widen it would be to wait for it.
  struct Added {
    Neighbours<T, 1> gain;
    Neighbours<float, 1> wide_bias;
    Neighbours<N, 1> bias, residual;
    WNFUSED_DEVICE static Added load(const Params& params, int sample, int row, bool valid) {
      const bool biased = valid && params.bias;
      const int at = sample * params.rows + row;
      return {Neighbours<T, 1>::load(params.g + row, valid),
              Neighbours<float, 1>::load(static_cast<const float*>(params.bias) + row, biased && params.bias_is_float),
              Neighbours<N, 1>::load(static_cast<const N*>(params.bias) + row, biased && !params.bias_is_float),
              Neighbours<N, 1>::load(params.residual + at, valid && params.residual)};
    }
  };

  // Zeros past the last column. Rows and samples past the last are the last: what they meet is not written.
  WNFUSED_DEVICE static Operands load(const Params& params, int first_row, int first_sample, int start) {
    const int lane = computed_again(lane_index()), group = lane / 4, column = start + 8 * (lane % 4);
    const bool inside = column < params.columns;
    const int row = first_row + group < params.rows ? first_row + group : params.rows - 1;
    Operands read;
    read.v = Neighbours<T, 8>::load(params.v + row * params.columns + column, inside);
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int own = first_sample + 8 * i + group, sample = own < params.samples ? own : params.samples - 1;
      read.x[i] = Neighbours<N, 8>::load(params.x + sample * params.columns + column, inside);
    }
    return read;
  }

  // This warp's part of the products and of the squares, to shared memory.
  WNFUSED_DEVICE static void products(const Params& params, int first_row, int first_sample, char* shared) {
    const int warp = thread_index() / 32, lane = lane_index(), group = lane / 4, t = lane % 4;
    float sums[kTiles][4] = {}, squares = 0.0f;
    constexpr int kStride = kWarps * kStep;
#pragma unroll 1
    for (int start = warp * kStep; start < params.columns; start += kAhead * kStride) {
      Operands read[kAhead];
#pragma unroll
      for (int ahead = 0; ahead < kAhead; ++ahead)
        read[ahead] = load(params, first_row, first_sample, start + ahead * kStride);
#pragma unroll
      for (int ahead = 0; ahead < kAhead; ++ahead) {
        if (start + ahead * kStride >= params.columns) break;
        const Operands& now = read[ahead];
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

  WNFUSED_DEVICE static void write(const Params& params, int sample, int row, const Added& added, const char* shared) {
    const int place = thread_index();
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += load_shared<float>(shared + (warp * kSamples * kRows + place) * 4);
    const float norm = load_shared<float>(shared + kNormsAt + place % kRows * 4);
    const float scale = row_scale(added.gain[0], norm);
    float value = is_finite(sum) ? sum * scale : plain_product(params, sample, row, scale);
    if (params.bias) value += params.bias_is_float ? added.wide_bias[0] : added.bias[0];
    if (params.residual) value += added.residual[0];
    store_global(params.y + sample * params.rows + row,
                 narrow<N>(params.activates ? activated(value, params.slope) : value));
  }

  WNFUSED_DEVICE static float plain_product(const Params& params, int sample, int row, float scale) {
    const N* x = params.x + sample * params.columns;
    const T* v = params.v + row * params.columns;
    float sum = 0.0f;
    for (int k = 0; k < params.columns && sum == sum; ++k)
      sum += widen(load_global<N>(x + k)) * (scale * widen(load_global<T>(v + k)));
    return sum;
  }
};

template <class Kind, class T, class N>
Status enqueue_small_linear(const SmallLinearParams<T, N>& params, Queue queue) {
  using One = SmallLinearForward<Kind, T, N, 1>;
  using Two = SmallLinearForward<Kind, T, N, 2>;
  if (params.samples <= 16) return launch<One>(params, One::blocks(params), queue);
  return launch<Two>(params, Two::blocks(params), queue);
}

}  // namespace wnfused::gpu

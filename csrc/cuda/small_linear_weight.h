// dv, dg and the bias's gradient (small_linear.h).
#pragma once

#include "cuda/small_linear.h"

namespace wnfused::gpu {

// A block takes 8 rows of v and all samples, whose mask dy it keeps in shared memory. A warp takes kPieces of 32
// columns, and keeps their dw in registers. A lane takes four neighbouring columns of four neighbouring samples at a
// time, and ends up with these columns of two rows.
template <class Kind, class T, class N, int kWarps_, int kPieces>
struct SmallLinearWeightGradient {
  using Params = SmallLinearParams<T, N>;
  static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps, kRows = 8, kStep = 16;
  // From one row's gradients to the next's, such that the lanes of a load lie in different banks.
  static constexpr int kLine = static_cast<int>(kMostSmallSamples) * 4 + 64;
  static constexpr int kDotsAt = kRows * kLine, kAlongAt = kDotsAt + kWarps * 32 * 8;
  static constexpr int kSharedBytes = kAlongAt + kRows * 4, kBlocksPerMultiprocessor = 1;
  static_assert(kWarps >= kRows && kWarps % 4 == 0, "a warp sums up one row, of four warps at once");

  static int64_t blocks(const Params& params) { return (params.rows + kRows - 1) / kRows; }

  WNFUSED_DEVICE static void run(const Params& params, char* shared) {
    const int first_row = block_index() * kRows, warp = thread_index() / 32, lane = lane_index();
    keep_gradients(params, first_row, shared);
    block_barrier();
    if (warp < kRows) sum_bias(params, first_row + warp, shared + warp * kLine);
    float dw[kPieces][2][4];
    Pair dots{0.0f, 0.0f};
    const Place place{first_row + 2 * (lane % 4), warp * 32 + 4 * (lane / 4)};
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      products(params, place.column + piece * kWarps * 32, shared, dw[piece]);
      add_dots(params, {place.row, place.column + piece * kWarps * 32}, dw[piece], dots);
    }
    store_shared(shared + kDotsAt + thread_index() * 8, dots);
    block_barrier();
    if (warp < kRows) sum_dots(params, first_row + warp, shared);
    block_barrier();
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int row = place.row + side;
      if (row >= params.rows) continue;
      const float along = load_shared<float>(shared + kAlongAt + (row - first_row) * 4);
      const float norm = load_global<float>(params.norm + row), gain = widen(load_global<T>(params.g + row));
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
        write(params, {row, place.column + piece * kWarps * 32}, dw[piece][side], norm, gain, along);
    }
  }

 private:
  struct alignas(8) Pair {
    float of[2];
  };
  struct Place {
    int row, column;
  };

  // [row][sample], zeros where there is none.
  WNFUSED_DEVICE static void keep_gradients(const Params& params, int first_row, char* shared) {
    const int samples = (params.samples + kStep - 1) / kStep * kStep;
    for (int i = thread_index(); i < samples * (kRows / 4); i += kThreads) {
      const int sample = i / (kRows / 4), row = i % (kRows / 4) * 4;
      const auto dz = MaskedGradient<T, N>::load(params, sample, first_row + row);
#pragma unroll
      for (int k = 0; k < 4; ++k) store_shared(shared + (row + k) * kLine + sample * 4, dz.at(params, k));
    }
  }

  WNFUSED_DEVICE static void sum_bias(const Params& params, int row, const char* line) {
    if (!params.dbias || row >= params.rows) return;
    float sum = 0.0f;
    for (int sample = lane_index(); sample < params.samples; sample += 32) sum += load_shared<float>(line + sample * 4);
    sum = warp_sum(sum);
    if (lane_index() != 0) return;
    if (params.bias_is_float)
      store_global(static_cast<float*>(params.dbias) + row, sum);
    else
      store_global(static_cast<N*>(params.dbias) + row, narrow<N>(sum));
  }

  // dw[0] and dw[1]: of the rows 2 t and 2 t + 1, the four columns from `column` on.
  WNFUSED_DEVICE static void products(const Params& params, int column, const char* shared, float (&dw)[2][4]) {
    const int group = lane_index() / 4, t = lane_index() % 4;
    const bool inside = column < params.columns;
    struct Lines {
      Neighbours<N, 4> of[4];
    };
    const auto load = [&](int start) {
      Lines read;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int sample = start + 4 * t + i;
        read.of[i] = Neighbours<N, 4>::load(params.x + static_cast<int64_t>(sample) * params.columns + column,
                                            inside && sample < params.samples);
      }
      return read;
    };
    using Kept = Neighbours<float, 4>;
    float sums[2][4] = {};
    Lines next = load(0);
#pragma unroll 1
    for (int start = 0; start < params.samples; start += kStep) {
      const Lines now = next;
      next = load(start + kStep);
      const Quad<Kind> b = quad_of<Kind>(load_shared<Kept>(shared + group * kLine + (start + 4 * t) * 4), 0);
      multiply_quads(sums[0], quad_across<Kind>(now.of, 0), quad_across<Kind>(now.of, 1), b);
      multiply_quads(sums[1], quad_across<Kind>(now.of, 2), quad_across<Kind>(now.of, 3), b);
    }
    bool finite = true;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      // Columns that are not there would add dy infinite times 0 to the row's dot product.
      const float sum = inside ? sums[k % 4 / 2][k % 2 * 2 + k / 4] : 0.0f;
      dw[k / 4][k % 4] = sum;
      finite = finite && is_finite(sum);
    }
    if (finite) return;
#pragma unroll 1
    for (int k = 0; k < 8; ++k) {
      const float sum = plain_product(params, column + k % 4, shared + (2 * t + k / 4) * kLine);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (i == k && !is_finite(dw[i / 4][i % 4])) dw[i / 4][i % 4] = sum;
    }
  }

  WNFUSED_DEVICE static float plain_product(const Params& params, int column, const char* line) {
    float sum = 0.0f;
    for (int sample = 0; sample < params.samples && sum == sum; ++sample)
      sum += load_shared<float>(line + sample * 4) *
             widen(load_global<N>(params.x + static_cast<int64_t>(sample) * params.columns + column));
    return sum;
  }

  // dg of this warp's row, kept for all.
  WNFUSED_DEVICE static void sum_dots(const Params& params, int row, char* shared) {
    const int warp = thread_index() / 32, lane = lane_index();
    // A row's sums lie with the lanes of one t, in the eight groups of every warp.
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps / 4; ++i) {
      const int from = (4 * i + lane / 8) * 32 + lane % 8 * 4 + warp / 2;
      dot += load_shared<float>(shared + kDotsAt + from * 8 + warp % 2 * 4);
    }
    dot = warp_sum(dot);
    if (lane != 0 || row >= params.rows) return;
    const float norm = load_global<float>(params.norm + row), along = norm == 0.0f ? 0.0f : dot * (1.0f / norm);
    store_global(params.dg + row, narrow<T>(along));
    store_shared(shared + kAlongAt + warp * 4, along);
  }

  WNFUSED_DEVICE static Neighbours<T, 4> direction(const Params& params, const Place& place) {
    return Neighbours<T, 4>::load(params.v + static_cast<int64_t>(place.row) * params.columns + place.column,
                                  place.row < params.rows && place.column < params.columns);
  }

  WNFUSED_DEVICE static void add_dots(const Params& params, const Place& place, const float (&dw)[2][4], Pair& dots) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const auto v = direction(params, {place.row + side, place.column});
#pragma unroll
      for (int i = 0; i < 4; ++i) dots.of[side] += dw[side][i] * v[i];
    }
  }

  WNFUSED_DEVICE static void write(const Params& params, const Place& place, const float (&dw)[4], float norm,
                                   float gain, float along) {
    if (place.column >= params.columns) return;
    const bool zero = norm == 0.0f;
    const float inverse = zero ? 0.0f : 1.0f / norm, scale = gain * inverse, unit = along * inverse;
    const auto v = direction(params, place);
    typename Neighbours<T, 4>::Raw dv;
#pragma unroll
    for (int i = 0; i < 4; ++i) dv.value[i] = narrow<T>(zero ? 0.0f : scale * (dw[i] - unit * v[i]));
    store_global(reinterpret_cast<typename Neighbours<T, 4>::Raw*>(
                     params.dv + static_cast<int64_t>(place.row) * params.columns + place.column),
                 dv);
  }
};

template <class Kind, class T, class N>
Status enqueue_small_linear_weight(const SmallLinearParams<T, N>& params, Queue queue) {
  const auto run = [&](auto kernel) {
    using Kernel = decltype(kernel);
    return launch<Kernel>(params, Kernel::blocks(params), queue);
  };
  if (params.columns <= 256) return run(SmallLinearWeightGradient<Kind, T, N, 8, 1>{});
  if (params.columns <= 1024) return run(SmallLinearWeightGradient<Kind, T, N, 8, 4>{});
  // More warps would leave them too few registers.
  constexpr int kWarps = Kind::kPrecision == Precision::kFloat32 ? 8 : 12, kAllPieces = kMostSmallColumns / 32;
  return run(SmallLinearWeightGradient<Kind, T, N, kWarps, (kAllPieces + kWarps - 1) / kWarps>{});
}

}  // namespace wnfused::gpu

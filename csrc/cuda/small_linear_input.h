// dx = (s mask dy) v (small_linear.h).
#pragma once

#include "cuda/small_linear.h"

namespace wnfused::gpu {

// Warps walk the rows of v, 16 at a time each: a lane takes four neighbouring rows, two neighbouring entries of each,
// and dy of two samples in each tile of 16 at these rows. A round is kAhead such steps, and dy of all of them is on its
// way to registers at once. For v beside it there are too few: the round's rows go to shared memory, and their scales,
// of which each thread makes a few.
//
//   shared memory   v [row of the round][column], later the sums [warp][sample][column]; scales [row of the round]
template <class Kind, class T, class N, int kWarps_>
struct SmallLinearInputGradient {
  using Params = SmallLinearParams<T, N>;
  static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps, kColumns = 16, kTiles = 2, kSamples = 16 * kTiles,
                       kStep = 16;
  // A step has 16 registers in bfloat16 and 32 in float.
  static constexpr int kAhead = kWarps == 8 && Kind::kIsBfloat16 ? 4 : 2;
  static constexpr int kStride = kWarps * kStep, kRound = kAhead * kStride;
  static constexpr int kScales = kRound / kThreads;  // of a thread
  // Lanes read rows four lines apart, two of them in the same banks; without the 16 bytes it would be all four.
  static constexpr int kUnit = 16 / static_cast<int>(sizeof(T)), kLine = kColumns * static_cast<int>(sizeof(T)) + 16;
  static constexpr int kSumBytes = kWarps * kSamples * kColumns * 4;
  static constexpr int kScalesAt = kRound * kLine < kSumBytes ? kSumBytes : kRound * kLine;
  static constexpr int kSharedBytes = kScalesAt + kRound * 4;

  WNFUSED_HOST_DEVICE static int column_blocks(int columns) { return (columns + kColumns - 1) / kColumns; }
  WNFUSED_HOST_DEVICE static int blocks(const Params& params) {
    return column_blocks(params.columns) * ((params.samples + kSamples - 1) / kSamples);
  }

  WNFUSED_DEVICE static void run(const Params& params, int block, char* shared) {
    const int columns = column_blocks(params.columns);
    const int first_column = block % columns * kColumns, first_sample = block / columns * kSamples;
    products(params, first_column, first_sample, shared);
    block_barrier();
    for (int i = thread_index(); i < kSamples * kColumns; i += kThreads)
      write(params, first_sample + i / kColumns, first_column + i % kColumns, i, shared);
  }

 private:
  // Of this warp's rows in a round, by step.
  struct Gradients {
    MaskedGradient<T, N> of[kAhead][2 * kTiles];
  };

  // From the row `first` on, zeros past the last. Samples past the last are the last: what they meet is not written.
  WNFUSED_DEVICE static Gradients load(const Params& params, int first, int first_sample) {
    const int thread = computed_again(thread_index()), warp = thread / 32, group = thread % 32 / 4, t = thread % 4;
    Gradients read;
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      const int row = first + ahead * kStride + warp * kStep + 4 * t;
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        const int own = first_sample + 8 * i + group, sample = own < params.samples ? own : params.samples - 1;
        read.of[ahead][i] = MaskedGradient<T, N>::load(params, sample, row, row < params.rows);
      }
    }
    return read;
  }

  // [row][column], zeros where there is none.
  WNFUSED_DEVICE static void copy_v(const Params& params, int first, int first_column, char* shared) {
    constexpr int kUnits = kColumns / kUnit;
    static_assert(kRound * kUnits % kThreads == 0, "every thread copies as much");
    const int thread = computed_again(thread_index());
#pragma unroll
    for (int k = 0; k < kRound * kUnits / kThreads; ++k) {
      const int i = thread + k * kThreads, line = i / kUnits, unit = i % kUnits;
      const int row = first + line, column = first_column + unit * kUnit;
      copy_async(shared + line * kLine + unit * 16, params.v + row * params.columns + column,
                 row < params.rows && column < params.columns);
    }
    commit_copies();
  }

  WNFUSED_DEVICE static void keep_scales(const Params& params, int first, char* shared) {
    const int line = thread_index() * kScales, row = first + line;
    const auto gain = Neighbours<T, kScales>::load(params.g + row, row < params.rows);
    const auto norm = Neighbours<float, kScales>::load(params.norm + row, row < params.rows);
    float scale[kScales];
#pragma unroll
    for (int i = 0; i < kScales; ++i) scale[i] = row_scale(gain[i], norm[i]);
    store_shared(shared + kScalesAt + line * 4, Neighbours<float, kScales>::of(scale));
  }

  WNFUSED_DEVICE static void products(const Params& params, int first_column, int first_sample, char* shared) {
    const int warp = thread_index() / 32, lane = lane_index(), group = lane / 4, t = lane % 4;
    float sums[kTiles][2][4] = {};
#pragma unroll 1
    for (int first = 0; first < params.rows; first += kRound) {
      copy_v(params, first, first_column, shared);
      const Gradients dz = load(params, first, first_sample);
      keep_scales(params, first, shared);
      wait_copies<0>();
      block_barrier();
#pragma unroll
      for (int ahead = 0; ahead < kAhead; ++ahead) {
        if (first + ahead * kStride >= params.rows) break;
        const int line = ahead * kStride + warp * kStep + 4 * t;
        const auto scale = load_shared<Neighbours<float, 4>>(shared + kScalesAt + line * 4);
        Neighbours<T, 2> v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          v[i] = load_shared<Neighbours<T, 2>>(shared + (line + i) * kLine + 2 * group * static_cast<int>(sizeof(T)));
        const auto scaled = [&](const MaskedGradient<T, N>& of) {
          return Quad<Kind>::of(scale[0] * of.at(params, 0), scale[1] * of.at(params, 1), scale[2] * of.at(params, 2),
                                scale[3] * of.at(params, 3));
        };
        const Quad<Kind> left = quad_across<Kind>(v, 0), right = quad_across<Kind>(v, 1);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const Quad<Kind> upper = scaled(dz.of[ahead][2 * i]), lower = scaled(dz.of[ahead][2 * i + 1]);
          multiply_quads(sums[i][0], upper, lower, left);
          multiply_quads(sums[i][1], upper, lower, right);
        }
      }
      block_barrier();  // the next round, or the sums, take its place
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
    store_global(params.dx + sample * params.columns + column, narrow<N>(sum));
  }

  WNFUSED_DEVICE static float plain_product(const Params& params, int sample, int column) {
    float sum = 0.0f;
    for (int row = 0; row < params.rows && sum == sum; row += 4) {
      const auto dz = MaskedGradient<T, N>::load(params, sample, row, true);
      for (int i = 0; i < 4; ++i) {
        const float scale =
            row_scale(widen(load_global<T>(params.g + row + i)), load_global<float>(params.norm + row + i));
        const float v = widen(load_global<T>(params.v + (row + i) * params.columns + column));
        sum += dz.at(params, i) * (scale * v);
      }
    }
    return sum;
  }
};

}  // namespace wnfused::gpu

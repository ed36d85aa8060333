// dv, dg and the bias's gradient (small_linear.h).
#pragma once

#include "cuda/small_linear.h"

namespace wnfused::gpu {

// A block takes 8 rows of v and all samples, whose mask dy it keeps in shared memory. A warp takes kPieces of 32
// columns, and keeps their dw in registers. A lane takes four neighbouring columns of four neighbouring samples at a
// time, and ends up with these columns of two rows.
//
// A group of pieces walks the samples together, kAhead steps a round. With the first round a block asks for all else
// that it reads: where all pieces are one group for v, too, which waits in shared memory. For more pieces v is read
// twice, behind the products and to write dv.
template <class Kind, class T, class N, int kWarps_, int kPieces>
struct SmallLinearWeightGradient {
  using Params = SmallLinearParams<T, N>;
  static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps, kRows = 8, kStep = 16;
  static constexpr bool kKeepsV = kPieces <= 4;
  // A step of a piece has 8 registers in bfloat16 and 16 in float, beside 8 that every piece has for dw.
  static constexpr int kGroup = kKeepsV ? kPieces : Kind::kIsBfloat16 ? 4 : 2;
  static constexpr int kOnTheirWay = Kind::kIsBfloat16 ? 8 : 4;  // steps of pieces
  static constexpr int kAhead = kKeepsV ? kOnTheirWay / kPieces : 1;
  static constexpr int kGroupOfV = kPieces < 4 ? kPieces : 4;
  // From one row's gradients to the next's, such that the lanes of a load lie in different banks.
  static constexpr int kLine = static_cast<int>(kMostSmallSamples) * 4 + 64;
  // The same for v: a load is of 16 bytes of rows two lines apart.
  static constexpr int kWidth = kPieces * kWarps * 32, kLineOfV = kWidth * static_cast<int>(sizeof(T)) + 16;
  static constexpr int kDotsAt = kRows * kLine, kAlongAt = kDotsAt + kWarps * 32 * 8, kNormsAt = kAlongAt + kRows * 4,
                       kGainsAt = kNormsAt + kRows * 4, kVAt = kGainsAt + kRows * 4;
  static constexpr int kSharedBytes = kVAt + (kKeepsV ? kRows * kLineOfV : 0);
  static_assert(kWarps >= kRows && kWarps % 4 == 0, "a warp sums up one row, of four warps at once");

  WNFUSED_HOST_DEVICE static int blocks(const Params& params) { return (params.rows + kRows - 1) / kRows; }

  WNFUSED_DEVICE static void run(const Params& params, int block, char* shared) {
    const int first_row = block * kRows, warp = thread_index() / 32, lane = lane_index();
    const Place place{first_row + 2 * (lane % 4), warp * 32 + 4 * (lane / 4)};
    const bool has_row = warp < kRows && first_row + warp < params.rows;
    if constexpr (kKeepsV) copy_v(params, first_row, shared + kVAt);
    const bool has_scale = thread_index() < kRows && first_row + thread_index() < params.rows;
    const auto norm = Neighbours<float, 1>::load(params.norm + first_row + thread_index(), has_scale);
    const auto gain = Neighbours<T, 1>::load(params.g + first_row + thread_index(), has_scale);
    const Gradients gradients = load_gradients(params, first_row);
    Round round = load_round(params, place.column, 0, 0);
    keep_gradients(params, gradients, shared);
    if (thread_index() < kRows) {
      store_shared(shared + kNormsAt + thread_index() * 4, norm[0]);
      store_shared(shared + kGainsAt + thread_index() * 4, gain[0]);
    }
    if constexpr (kKeepsV) wait_copies<0>();
    block_barrier();
    if (has_row) sum_bias(params, first_row + warp, shared + warp * kLine);
    float dw[kPieces][2][4] = {};
#pragma unroll
    for (int first = 0; first < kPieces; first += kGroup) {
      if (first > 0) round = load_round(params, place.column, first, 0);
      products(params, place.column, first, shared, round, dw);
    }
    make_finite(params, place.column, shared, dw);
    Pair dots{0.0f, 0.0f};
#pragma unroll
    for (int first = 0; first < kPieces; first += kGroupOfV)
      add_dots(first, directions(params, place, first, shared), dw, dots);
    store_shared(shared + kDotsAt + thread_index() * 8, dots);
    block_barrier();
    if (has_row) sum_dots(params, first_row + warp, shared);
    block_barrier();
    if (place.row >= params.rows) return;
    const auto of_rows = [&](int at) {
      return load_shared<Neighbours<float, 2>>(shared + at + (place.row - first_row) * 4);
    };
    const auto along = of_rows(kAlongAt), norms = of_rows(kNormsAt), gains = of_rows(kGainsAt);
    bool zero[2];
    float scale[2], unit[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      zero[side] = norms[side] == 0.0f;
      const float inverse = zero[side] ? 0.0f : 1.0f / norms[side];
      scale[side] = gains[side] * inverse;
      unit[side] = along[side] * inverse;
    }
#pragma unroll
    for (int first = 0; first < kPieces; first += kGroupOfV) {
      const Directions v = directions(params, place, first, shared);
#pragma unroll
      for (int i = 0; i < kGroupOfV && first + i < kPieces; ++i)
#pragma unroll
        for (int side = 0; side < 2; ++side)
          write(params, place.piece(first + i), side, dw[first + i][side], v.of[i][side], zero[side], scale[side],
                unit[side]);
    }
  }

 private:
  struct alignas(8) Pair {
    float of[2];
  };
  struct Place {
    int row, column;
    WNFUSED_DEVICE Place piece(int i) const { return {row, column + i * kWarps * 32}; }
  };
  // Of two rows, the four columns of each piece of a group of v's.
  struct Directions {
    Neighbours<T, 4> of[kGroupOfV][2];
  };
  // Of four samples in each step, the four columns of each piece of a group.
  struct Round {
    Neighbours<N, 4> of[kAhead][kGroup][4];
  };
  // Of the samples that this thread keeps for the block, four rows at a time.
  static constexpr int kQuads = kRows / 4;
  struct Gradients {
    static constexpr int kCount = (static_cast<int>(kMostSmallSamples) * kQuads + kThreads - 1) / kThreads;
    MaskedGradient<T, N> of[kCount];
  };

  // [row][column], zeros where there is none.
  WNFUSED_DEVICE static void copy_v(const Params& params, int first_row, char* shared) {
    constexpr int kUnit = 16 / static_cast<int>(sizeof(T)), kUnits = kWidth / kUnit;
    static_assert(kRows * kUnits % kThreads == 0, "every thread copies as much");
#pragma unroll
    for (int k = 0; k < kRows * kUnits / kThreads; ++k) {
      const int i = thread_index() + k * kThreads, line = i / kUnits, unit = i % kUnits;
      const int row = first_row + line, column = unit * kUnit;
      copy_async(shared + line * kLineOfV + unit * 16, params.v + row * params.columns + column,
                 row < params.rows && column < params.columns);
    }
    commit_copies();
  }

  WNFUSED_DEVICE static Gradients load_gradients(const Params& params, int first_row) {
    Gradients read;
#pragma unroll
    for (int k = 0; k < Gradients::kCount; ++k) {
      const int i = thread_index() + k * kThreads;
      const int sample = i / kQuads, row = first_row + i % kQuads * 4;
      read.of[k] = MaskedGradient<T, N>::load(params, sample, row, sample < params.samples && row < params.rows);
    }
    return read;
  }

  // [row][sample], zeros where there is none.
  WNFUSED_DEVICE static void keep_gradients(const Params& params, const Gradients& read, char* shared) {
    const int samples = (params.samples + kStep - 1) / kStep * kStep;
#pragma unroll
    for (int k = 0; k < Gradients::kCount; ++k) {
      const int i = thread_index() + k * kThreads, sample = i / kQuads, row = i % kQuads * 4;
      if (sample >= samples) break;
#pragma unroll
      for (int j = 0; j < 4; ++j) store_shared(shared + (row + j) * kLine + sample * 4, read.of[k].at(params, j));
    }
  }

  WNFUSED_DEVICE static void sum_bias(const Params& params, int row, const char* line) {
    if (!params.dbias) return;
    float sum = 0.0f;
    for (int sample = lane_index(); sample < params.samples; sample += 32) sum += load_shared<float>(line + sample * 4);
    sum = warp_sum(sum);
    if (lane_index() != 0) return;
    if (params.bias_is_float)
      store_global(static_cast<float*>(params.dbias) + row, sum);
    else
      store_global(static_cast<N*>(params.dbias) + row, narrow<N>(sum));
  }

  WNFUSED_DEVICE static Round load_round(const Params& params, int column, int first, int start) {
    Round read;
    start = computed_again(start);
    column = computed_again(column);
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      const int sample = start + ahead * kStep + 4 * (lane_index() % 4);
#pragma unroll
      for (int piece = 0; piece < kGroup && first + piece < kPieces; ++piece) {
        const int at = column + (first + piece) * kWarps * 32;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          read.of[ahead][piece][i] = Neighbours<N, 4>::load(params.x + (sample + i) * params.columns + at,
                                                            at < params.columns && sample + i < params.samples);
      }
    }
    return read;
  }

  // dw[piece][0] and [1], of the group that starts with piece `first`: of the rows 2 t and 2 t + 1, four columns.
  // `round` is the first of its rounds.
  WNFUSED_DEVICE static void products(const Params& params, int column, int first, const char* shared, Round round,
                                      float (&dw)[kPieces][2][4]) {
    const int group = lane_index() / 4, t = lane_index() % 4;
    float sums[kGroup][2][4] = {};
    int start = 0;
#pragma unroll 1
    while (true) {
#pragma unroll
      for (int ahead = 0; ahead < kAhead; ++ahead) {
        const int step = start + ahead * kStep;
        if (step < params.samples) {
          const auto kept = load_shared<Neighbours<float, 4>>(shared + group * kLine + (step + 4 * t) * 4);
          const Quad<Kind> b = quad_of<Kind>(kept, 0);
#pragma unroll
          for (int piece = 0; piece < kGroup && first + piece < kPieces; ++piece) {
            const auto& x = round.of[ahead][piece];
            multiply_quads(sums[piece][0], quad_across<Kind>(x, 0), quad_across<Kind>(x, 1), b);
            multiply_quads(sums[piece][1], quad_across<Kind>(x, 2), quad_across<Kind>(x, 3), b);
          }
        }
      }
      start += kAhead * kStep;
      if (start >= params.samples) break;
      round = load_round(params, column, first, start);
    }
#pragma unroll
    for (int piece = 0; piece < kGroup && first + piece < kPieces; ++piece)
#pragma unroll
      for (int k = 0; k < 8; ++k) dw[first + piece][k / 4][k % 4] = sums[piece][k % 4 / 2][k % 2 * 2 + k / 4];
  }

  WNFUSED_DEVICE static void make_finite(const Params& params, int column, const char* shared,
                                         float (&dw)[kPieces][2][4]) {
    bool finite = true;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        // Columns that are not there would add dy infinite times 0 to the row's dot product.
        if (column + piece * kWarps * 32 >= params.columns) dw[piece][k / 4][k % 4] = 0.0f;
        finite = finite && is_finite(dw[piece][k / 4][k % 4]);
      }
    if (finite) return;
#pragma unroll 1
    for (int index = 0; index < kPieces * 8; ++index) {
      const int piece = index / 8, k = index % 8, at = column + piece * kWarps * 32 + k % 4;
      if (at >= params.columns) break;
      const float sum = plain_product(params, at, shared + (2 * (lane_index() % 4) + k / 4) * kLine);
#pragma unroll
      for (int i = 0; i < kPieces * 8; ++i) {
        float& there = dw[i / 8][i / 4 % 2][i % 4];
        if (i == index && !is_finite(there)) there = sum;
      }
    }
  }

  WNFUSED_DEVICE static float plain_product(const Params& params, int column, const char* line) {
    float sum = 0.0f;
    for (int sample = 0; sample < params.samples && sum == sum; ++sample)
      sum += load_shared<float>(line + sample * 4) *
             widen(load_global<N>(params.x + sample * params.columns + column));
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
    if (lane != 0) return;
    const float norm = load_shared<float>(shared + kNormsAt + warp * 4);
    const float along = norm == 0.0f ? 0.0f : dot * (1.0f / norm);
    store_global(params.dg + row, narrow<T>(along));
    store_shared(shared + kAlongAt + warp * 4, along);
  }

  WNFUSED_DEVICE static Directions directions(const Params& params, const Place& place, int first, const char* shared) {
    Directions read;
#pragma unroll
    for (int i = 0; i < kGroupOfV && first + i < kPieces; ++i)
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int row = place.row + side, column = place.piece(first + i).column;
        if constexpr (kKeepsV)
          read.of[i][side] = load_shared<Neighbours<T, 4>>(shared + kVAt + row % kRows * kLineOfV +
                                                           column * static_cast<int>(sizeof(T)));
        else
          read.of[i][side] = Neighbours<T, 4>::load(params.v + row * params.columns + column,
                                                    row < params.rows && column < params.columns);
      }
    return read;
  }

  WNFUSED_DEVICE static void add_dots(int first, const Directions& v, const float (&dw)[kPieces][2][4], Pair& dots) {
#pragma unroll
    for (int piece = 0; piece < kGroupOfV && first + piece < kPieces; ++piece)
#pragma unroll
      for (int side = 0; side < 2; ++side)
#pragma unroll
        for (int i = 0; i < 4; ++i) dots.of[side] += dw[first + piece][side][i] * v.of[piece][side][i];
  }

  WNFUSED_DEVICE static void write(const Params& params, const Place& place, int side, const float (&dw)[4],
                                   const Neighbours<T, 4>& v, bool zero, float scale, float unit) {
    if (place.column >= params.columns) return;
    float dv[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) dv[i] = zero ? 0.0f : scale * (dw[i] - unit * v[i]);
    store_global(params.dv + (place.row + side) * params.columns + place.column, Neighbours<T, 4>::of(dv));
  }
};

}  // namespace wnfused::gpu

// Weight norm and packing of all convolutions of a stage in one launch: a block of threads takes 16 rows (filters) of
// one convolution, a warp a row at a time.
//
//   read     v [2 B, C, C, 3, 3] once: a row stays in the registers of its warp from the norm to the weights
//   write    w = g v / ||v||, rounded to the operands' precision, in the order in which the stage's kernel uses it, and
//            the same with taps flipped and channels exchanged for the backward, last convolution first; the row norms;
//            the bias in fp32
//
// The order is the kernel's own, in pieces of 16 bytes; taps are numbered column by column. For mma a packed
// convolution is [tap][C / depth][C / 16][lane][4 registers]: the four registers are the B fragments of two tiles of 8
// output channels, so that a lane reads 16 bytes and a warp 512 in a row. 16 rows have every value of a piece, forward
// and backward: they pass through shared memory, [16][9 C], each 16 bytes further than the last, so that the 8 rows and
// 4 channels that a warp gathers at once are in different banks; and pieces are written whole.
#pragma once

#include "cuda/memory.h"
#include "cuda/precision.h"

namespace wnfused::gpu {

struct PackParams {
  Values v, g, bias;
  float* norm;      // null: not wanted
  char* forward;    // null: not wanted
  char* backward;   // null: not wanted
  float* bias_out;  // null: not wanted
  int64_t convs;
};

// A weight's output channel, input channel and tap.
struct PackedWeight {
  int n, k, tap;
};

// Packed weights as the fragments of mma.
template <class Precision_, int kChannels_>
struct FragmentWeights {
  using Precision = Precision_;
  static constexpr int kChannels = kChannels_;

  // What stands at value `index` of a packed convolution.
  WNFUSED_DEVICE static PackedWeight at(int index) {
    constexpr int kPerRegister = 4 / Precision::kBytes;
    const int reg = index / kPerRegister % 4, lane = index / (4 * kPerRegister) % 32;
    const int fragment = index / (128 * kPerRegister), tile = fragment % kTiles, step = fragment / kTiles % kSteps;
    return {tile * 16 + reg / 2 * 8 + lane / 4,
            step * Precision::kDepth + (reg % 2 * 4 + lane % 4) * kPerRegister + index % kPerRegister,
            fragment / (kTiles * kSteps)};
  }

  // The pieces whose output channels, or input channels, are 16 from 16 `group` on, numbered by `i`.
  WNFUSED_DEVICE static int piece(int i, int group, bool by_input) {
    constexpr int kGroupSteps = 16 / Precision::kDepth;
    const int lane = i % 32, fragment = i / 32;
    if (!by_input) return (fragment * kTiles + group) * 32 + lane;
    const int tile = fragment % kTiles, step = group * kGroupSteps + fragment / kTiles % kGroupSteps;
    return ((fragment / (kTiles * kGroupSteps) * kSteps + step) * kTiles + tile) * 32 + lane;
  }

 private:
  static constexpr int kTiles = kChannels / 16, kSteps = kChannels / Precision::kDepth;
};

template <class Weights>
struct PackKernel {
  using Params = PackParams;
  using Precision = typename Weights::Precision;
  static constexpr int kChannels = Weights::kChannels;
  static constexpr int kRows = 16, kRowSize = kChannels * 9, kRowBytes = kRowSize * Precision::kBytes + 16;
  static constexpr int kThreads = 256, kSharedBytes = kRows * kRowBytes, kBlocksPerMultiprocessor = 4;
  static constexpr int kConvBytes = kRowSize * kChannels * Precision::kBytes;

  WNFUSED_DEVICE static void run(const Params& params, char* shared) {
    constexpr int kGroups = kChannels / kRows;
    const int64_t conv = block_index() / kGroups;
    const int group = block_index() % kGroups;
#pragma unroll 1
    for (int row = thread_index() / 32; row < kRows; row += kThreads / 32)
      scale_row(params, static_cast<int64_t>(block_index()) * kRows + row, shared + row * kRowBytes);
    block_barrier();
    if (params.forward) write<false>(params.forward + conv * kConvBytes, group, shared);
    if (params.backward) write<true>(params.backward + (params.convs - 1 - conv) * kConvBytes, group, shared);
  }

 private:
  // The weights of row `row` of all convolutions, rounded, to shared memory.
  WNFUSED_DEVICE static void scale_row(const Params& params, int64_t row, char* to) {
    constexpr int kShare = (kRowSize + 31) / 32;
    const int lane = lane_index();
    float values[kShare], squares = 0.0f;
    if (params.v.bfloat16)  // asked once, so that all of the row's loads are on their way together
      load_row<true>(values, params.v, row);
    else
      load_row<false>(values, params.v, row);
#pragma unroll
    for (int j = 0; j < kShare; ++j) squares += values[j] * values[j];
    const float norm = square_root(warp_sum(squares));
    const float scale = norm == 0.0f ? 0.0f : load_value(params.g, row) / norm;
    if (lane == 0) {
      if (params.norm) store_global(params.norm + row, norm);
      if (params.bias_out) store_global(params.bias_out + row, load_value(params.bias, row));
    }
#pragma unroll
    for (int j = 0; j < kShare; ++j) {
      const int i = 32 * j + lane;
      // A zero row has zero weights, also where the gain is infinite.
      const auto pair = Precision::pack(norm == 0.0f ? 0.0f : scale * values[j], 0.0f);
      if (i >= kRowSize) continue;
      if constexpr (Precision::kIsBfloat16)
        store_shared<uint16_t>(to + i * 2, static_cast<uint16_t>(pair));
      else
        store_shared<float>(to + i * 4, pair.low);
    }
  }

  template <bool kBfloat16, int kShare>
  WNFUSED_DEVICE static void load_row(float (&values)[kShare], const Values& v, int64_t row) {
#pragma unroll
    for (int j = 0; j < kShare; ++j) {
      const int i = 32 * j + lane_index();
      values[j] = i < kRowSize ? load_value(Values{v.data, kBfloat16}, row * kRowSize + i) : 0.0f;
    }
  }

  // The pieces that these 16 rows make up. In the backward, rows are input channels.
  template <bool kBackward>
  WNFUSED_DEVICE static void write(char* packed, int group, const char* shared) {
    constexpr int kPerPiece = 16 / Precision::kBytes;
    for (int i = thread_index(); i < kRows * kRowSize / kPerPiece; i += kThreads) {
      const int piece = Weights::piece(i, group, kBackward);
      Bytes16 values{};
#pragma unroll
      for (int j = 0; j < kPerPiece; ++j) {
        const PackedWeight weight = Weights::at(piece * kPerPiece + j);
        const int n = kBackward ? weight.k : weight.n, k = kBackward ? weight.n : weight.k;
        const int tap = kBackward ? 8 - weight.tap : weight.tap;
        const char* from =
            shared + n % kRows * kRowBytes + (k * 9 + tap % 3 * 3 + tap / 3) * Precision::kBytes;
        if constexpr (Precision::kIsBfloat16)
          values.word[j / 2] |= static_cast<uint32_t>(load_shared<uint16_t>(from)) << 16 * (j % 2);
        else
          values.word[j] = load_shared<uint32_t>(from);
      }
      store_global(packed + piece * 16, values);
    }
  }
};

}  // namespace wnfused::gpu

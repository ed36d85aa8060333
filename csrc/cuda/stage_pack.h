// Weight norm and packing of all convolutions of a stage in one launch: one warp takes one row (one filter).
//
//   read     v [2 B, C, C, 3, 3] once; the second pass over a row comes from the first-level cache
//   write    w = g v / ||v||, rounded to the operands' precision, in the order in which the stage's kernel uses it, and the
//            same with taps flipped and channels exchanged for the backward, last convolution first; the row norms; the
//            bias in fp32
//
// The order is the kernel's own; taps are numbered column by column. For mma a packed convolution is
// [tap][C / depth][C / 16][lane][4 registers]: the four registers are the B fragments of two tiles of 8 output channels,
// so that a lane reads 16 bytes and a warp 512 in a row.
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

// Packed weights as the fragments of mma.
template <class Precision_, int kChannels_>
struct FragmentWeights {
  using Precision = Precision_;
  static constexpr int kChannels = kChannels_;

  // Where the weight of output channel `n`, input channel `k` and tap `tap` stands, in values.
  WNFUSED_DEVICE static int index(int n, int k, int tap) {
    constexpr int kPerRegister = 4 / Precision::kBytes;
    const int fragment = (tap * (kChannels / Precision::kDepth) + k / Precision::kDepth) * (kChannels / 16) + n / 16;
    const int depth = k % Precision::kDepth;
    const int lane = n % 8 * 4 + depth % (4 * kPerRegister) / kPerRegister;
    const int reg = n / 8 % 2 * 2 + depth / (4 * kPerRegister);
    return ((fragment * 32 + lane) * 4 + reg) * kPerRegister + depth % kPerRegister;
  }
};

template <class Weights>
struct PackKernel {
  using Params = PackParams;
  using Precision = typename Weights::Precision;
  static constexpr int kChannels = Weights::kChannels;
  static constexpr int kThreads = 256, kSharedBytes = 0, kBlocksPerMultiprocessor = 4;
  static constexpr int kRows = kThreads / 32, kRowSize = kChannels * 9;
  static constexpr int64_t kConvValues = int64_t{kRowSize} * kChannels;

  WNFUSED_DEVICE static void run(const Params& params, char*) {
    const int64_t row = static_cast<int64_t>(block_index()) * kRows + thread_index() / 32;
    if (row >= params.convs * kChannels) return;
    const int64_t conv = row / kChannels;
    const int n = static_cast<int>(row % kChannels);

    float squares = 0.0f;
    for (int i = lane_index(); i < kRowSize; i += 32) {
      const float value = load_value(params.v, row * kRowSize + i);
      squares += value * value;
    }
    const float norm = square_root(warp_sum(squares));
    const float scale = norm == 0.0f ? 0.0f : load_value(params.g, row) / norm;
    if (lane_index() == 0) {
      if (params.norm) store_global(params.norm + row, norm);
      if (params.bias_out) store_global(params.bias_out + row, load_value(params.bias, row));
    }
    for (int i = lane_index(); i < kRowSize; i += 32) {
      // A zero row has zero weights, also where the gain is infinite.
      const float weight = norm == 0.0f ? 0.0f : scale * load_value(params.v, row * kRowSize + i);
      const int k = i / 9, tap = i % 3 * 3 + i % 9 / 3;
      if (params.forward) store_weight(params.forward, conv, Weights::index(n, k, tap), weight);
      if (params.backward)
        store_weight(params.backward, params.convs - 1 - conv, Weights::index(k, n, 8 - tap), weight);
    }
  }

 private:
  WNFUSED_DEVICE static void store_weight(char* packed, int64_t conv, int index, float weight) {
    const auto pair = Precision::pack(weight, 0.0f);
    char* place = packed + (conv * kConvValues + index) * Precision::kBytes;
    if constexpr (Precision::kIsBfloat16)
      store_global<uint16_t>(place, static_cast<uint16_t>(pair));
    else
      store_global<float>(place, pair.low);
  }
};

}  // namespace wnfused::gpu

// How one block of the residual stage's kernel is cut: which pixels and channels each warp owns, and what lies where in
// shared memory. The picture, for C channels on maps of H x W and `kImages` images a block:
//
//   registers      h, or its gradient, in fp32, and the running sums of one convolution: for each warp kTiles tiles of
//                  16 pixels x kColumns tiles of 8 channels, as mma leaves them (four values a lane and tile, twice)
//   operand        [C / 8][kImages][H + 2][W + 2][8] bf16, or [C / 4]..[4] fp32: 16 bytes are neighbouring channels of
//                  one pixel, the border of zeros makes every tap a constant shift, and 8 neighbouring pixels are the 8
//                  rows of an ldmatrix, 128 bytes in a row: no bank conflict. Two of them (kBuffers = 2) let the warps
//                  that finish a convolution early store its result; with one, a barrier comes between.
//   weight ring    kSlots chunks of kChunkTaps taps, each a stream of B fragments in the order of their use
//                  (stage_pack.h): a lane reads its 16 bytes for two tiles of 8 output channels
//
// Every block of the stage runs in one launch; what passes through global memory is the weights (once a block of
// threads, from the second-level cache after the first), the maps that the backward needs, and x and y. Floor a
// convolution and image: 18 C^2 H W FLOP, and 9 C^2 values of weights into shared memory.
#pragma once

#include "cuda/precision.h"

namespace wnfused::gpu {

template <class Precision_, int kChannels_, int kHeight_, int kWidth_, int kImages_, int kWarpRows_, int kWarpColumns_,
          int kChunkTaps_, int kSlots_, int kBuffers_>
struct StageConfig {
  using Precision = Precision_;
  static constexpr int kChannels = kChannels_, kHeight = kHeight_, kWidth = kWidth_, kImages = kImages_;
  static constexpr int kWarpRows = kWarpRows_, kWarpColumns = kWarpColumns_;
  static constexpr int kChunkTaps = kChunkTaps_, kSlots = kSlots_, kBuffers = kBuffers_;

  static constexpr int kWarps = kWarpRows * kWarpColumns, kThreads = 32 * kWarps;
  static constexpr int kMap = kHeight * kWidth, kPixels = kImages * kMap;
  static constexpr int kTiles = (kPixels + 16 * kWarpRows - 1) / (16 * kWarpRows);  // a warp's tiles of 16 pixels
  static constexpr int kColumns = kChannels / 8 / kWarpColumns;                     // and of 8 channels
  static constexpr bool kRagged = kPixels != kTiles * kWarpRows * 16;               // tiles reach past the last pixel
  static constexpr bool kEmptyBlocks = false;  // whether a launch may have blocks of threads past the last image
  static constexpr bool kStartsSums = false;   // whether a convolution's first products add to nothing

  // Bytes of the operand. A plane holds 16 bytes of every pixel and its border.
  static constexpr int kPlanes = kChannels / Precision::kVector;
  static constexpr int kPaddedWidth = kWidth + 2, kPaddedMap = (kHeight + 2) * kPaddedWidth;
  static constexpr int kPlaneBytes = kImages * kPaddedMap * 16, kOperandBytes = kPlanes * kPlaneBytes;

  // Bytes of packed weights.
  static constexpr int kTapBytes = kChannels * kChannels * Precision::kBytes;
  static constexpr int kChunkBytes = kChunkTaps * kTapBytes;
  static constexpr int kChunks = 9 / kChunkTaps;
  static constexpr int kSharedBytes = kBuffers * kOperandBytes + kSlots * kChunkBytes;

  // Tiles of 16 pixels start at the same place of a row for every warp, so the shift from one to the next is a
  // constant.
  static constexpr int kWarpPixels = 16 * kTiles;
  static constexpr bool kRegular = !kRagged && (16 % kWidth == 0 || kWidth % 16 == 0) && kWarpPixels % kWidth == 0 &&
                                   (kMap % 16 == 0 || 16 % kMap == 0) &&
                                   (kMap % kWarpPixels == 0 || kWarpPixels % kMap == 0);
  // Split fragments take twice the registers, and with three products each are not short of loads.
  static constexpr bool kSplits = sizeof(typename Precision::Fragment) > 16;
  // A row of pixels serves three taps: a fragment is loaded once for the three output rows it belongs to.
  static constexpr bool kReusesRows = kRegular && (kWidth % 16 == 0 || kWidth == 8) && kMap % kWarpPixels == 0 &&
                                      kChunkTaps % 3 == 0 && !kSplits;

  // Whether sums and stream leave registers for what could be computed again.
  static constexpr bool kSparesRegisters = kTiles * kColumns <= 8;

  static_assert(kChannels % 16 == 0 && kColumns % 2 == 0, "a B fragment holds two tiles of 8 channels");
  static_assert(9 % kChunkTaps == 0 && kSlots >= 2 && (kBuffers == 1 || kBuffers == 2));

  // Where pixel `pixel` of the block stands in a plane, as the top left corner of its 3x3 window.
  WNFUSED_HOST_DEVICE static constexpr int window(int pixel) {
    return pixel / kMap * kPaddedMap + pixel % kMap / kWidth * kPaddedWidth + pixel % kWidth;
  }
  static constexpr int kCentre = kPaddedWidth + 1;

  // Taps are numbered column by column, so that a chunk of three has the three rows of one column.
  WNFUSED_HOST_DEVICE static constexpr int tap_shift(int tap) { return tap % 3 * kPaddedWidth + tap / 3; }
};

// The tiles of one warp.
template <class Config>
struct WarpTile {
  int first_pixel, first_channel;

  WNFUSED_DEVICE WarpTile() {
    const int warp = thread_index() / 32;
    first_pixel = warp / Config::kWarpColumns * Config::kWarpPixels;
    first_channel = warp % Config::kWarpColumns * Config::kColumns * 8;
  }

  // The window of row `row` of tile `tile`. Where tiles are regular the tile adds a constant to what the row alone
  // gives.
  WNFUSED_DEVICE int window(int tile, int row) const {
    if constexpr (Config::kRegular)
      return Config::window(first_pixel + row) + Config::window(16 * tile);
    else {
      const int pixel = first_pixel + 16 * tile + row;
      return Config::window(Config::kRagged && pixel >= Config::kPixels ? 0 : pixel);
    }
  }
};

}  // namespace wnfused::gpu

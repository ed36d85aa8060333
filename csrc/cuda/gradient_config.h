// How one block of the weight-gradient kernel is cut. dw[n, c, tap] = sum over pixels p of g[n, p] x[c, p + tap]: a matrix
// product whose depth is the pixels of the batch, nine times with x shifted.
//
//   item         kImages whole maps, or a band of kRows rows of one: what is in shared memory at a time. A ring of kStages
//   x            [C / vector][kImages][kRows + 2][W + 2] x 16 bytes: with the border, so that a tap is a constant shift
//   g            [C / vector][pixels] x 16 bytes, zeros past the last pixel up to a whole k-step
//   registers    a warp owns kTileRows output channels x 16 input channels x 9 taps of dw; kSplit warps share a tile and
//                take k-steps in turn. The column of ones that g meets besides x gives the bias gradient
//
// bf16 fragments are transposed on their way (ldmatrix.trans); tf32 has no such load, so each lane gathers its values:
// planes of 4 (mod 8) pixels put the two planes that a warp reads at once into different halves of the banks.
#pragma once

#include "cuda/precision.h"

namespace wnfused::gpu {

template <class Precision_, int kChannels_, int kHeight_, int kWidth_, int kImages_, int kRows_, int kSplit_, int kStages_>
struct GradientConfig {
  using Precision = Precision_;
  static constexpr int kChannels = kChannels_, kHeight = kHeight_, kWidth = kWidth_;
  static constexpr int kImages = kImages_, kRows = kRows_, kSplit = kSplit_, kStages = kStages_;
  static_assert(kHeight % kRows == 0 && (kImages == 1 || kRows == kHeight));

  static constexpr int kBands = kHeight / kRows, kMap = kHeight * kWidth;
  static constexpr int kPixels = kImages * kRows * kWidth;
  static constexpr int kSteps = (kPixels + Precision::kDepth - 1) / Precision::kDepth;

  static constexpr int kPlanes = kChannels / Precision::kVector;
  static constexpr int kPaddedWidth = kWidth + 2, kPaddedBand = (kRows + 2) * kPaddedWidth;
  static constexpr int padded_plane(int pixels) { return (pixels + 3) / 8 * 8 + 4; }
  static constexpr int kInputPlaneBytes = padded_plane(kImages * kPaddedBand) * 16;
  static constexpr int kGradientPlaneBytes = padded_plane(kSteps * Precision::kDepth) * 16;
  static constexpr int kInputBytes = kPlanes * kInputPlaneBytes;
  static constexpr int kStageBytes = kInputBytes + kPlanes * kGradientPlaneBytes;

  static constexpr int kTileRows = kChannels >= 32 ? 32 : 16, kTileFragments = kTileRows / 16;
  static constexpr int kRowTiles = kChannels / kTileRows, kColumnTiles = kChannels / 16;
  static constexpr int kWarps = kRowTiles * kColumnTiles * kSplit, kThreads = 32 * kWarps;

  // Afterwards the same memory holds kTileRows rows of dw, summed over the warps that share them, and their bias sums.
  static constexpr int kRowSize = kChannels * 9;
  static constexpr int kSumBytes = kTileRows * (kRowSize + 1) * 4;
  static constexpr int kSharedBytes = kStages * kStageBytes > kSumBytes ? kStages * kStageBytes : kSumBytes;

  // Where pixel `pixel` of an item stands in a plane of x, as the top left corner of its window.
  WNFUSED_HOST_DEVICE static constexpr int window(int pixel) {
    constexpr int kBand = kRows * kWidth;
    return pixel / kBand * kPaddedBand + pixel % kBand / kWidth * kPaddedWidth + pixel % kWidth;
  }
};

}  // namespace wnfused::gpu

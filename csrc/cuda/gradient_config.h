// How one block of the weight-gradient kernel is cut. dw[n, c, tap] = sum over pixels p of g[n, p] x[c, p + tap]: a
// matrix product whose depth is the pixels of the batch, nine times with x shifted.
//
//   item         kImages whole maps, or a band of kRows rows of one; shared memory holds a ring of kStages
//   x            [kImages][kRows + 2][kPitch pixels][C]: with the border, so that a tap is a constant shift. Left of a
//                row are kBorder pixels of zeros, and right of it those of the next row
//   g            [pixels][C], zeros past the last pixel up to a whole k-step
//   registers    a warp owns kTileRows output channels x 16 input channels x 9 taps of dw; kSplit warps share a tile
//                and take k-steps in turn. The column of ones that g meets besides x gives the bias gradient
//
// Pixels lie as in global memory, and 128 bytes of it, a line, fill 128 bytes of shared memory: a copy that parts the
// 32 bytes of a sector asks the second-level cache for each half, and so for twice as many bytes. What is exchanged, by
// the column, are the units of 8 channels of a pixel: 8 neighbouring pixels of 16 bytes (bf16), or 4 of 32 (fp32), are
// read from different banks. bf16 fragments are transposed on their way (ldmatrix.trans); tf32 has no such load, so
// each lane gathers its values.
//
// Where the k-steps are whole in the rows of the map (kRuns > 0) a warp goes down kRun rows of a column of k-steps: a
// fragment of x is loaded once for the three rows of g that it meets, and all places but the first are constants.
#pragma once

#include "cuda/precision.h"

namespace wnfused::gpu {

template <class Precision_, int kChannels_, int kHeight_, int kWidth_, int kImages_, int kRows_, int kSplit_,
          int kStages_>
struct GradientConfig {
  using Precision = Precision_;
  static constexpr int kChannels = kChannels_, kHeight = kHeight_, kWidth = kWidth_;
  static constexpr int kImages = kImages_, kRows = kRows_, kSplit = kSplit_, kStages = kStages_;
  static_assert(kHeight % kRows == 0 && (kImages == 1 || kRows == kHeight));

  static constexpr int kBands = kHeight / kRows, kMap = kHeight * kWidth;
  static constexpr int kPixels = kImages * kRows * kWidth;
  static constexpr int kSteps = (kPixels + Precision::kDepth - 1) / Precision::kDepth;

  static constexpr int kPixelBytes = kChannels * Precision::kBytes, kLine = 128;
  static constexpr int kBorder = kPixelBytes < kLine ? kLine / kPixelBytes : 1;
  static_assert(kWidth % kBorder == 0, "every row begins with a line");
  static constexpr int kPitch = kWidth + kBorder, kPaddedBand = (kRows + 2) * kPitch;
  static constexpr int kInputBytes = ((kImages * kPaddedBand + kBorder) * kPixelBytes + kLine - 1) / kLine * kLine;
  static constexpr int kGradientBytes = (kSteps * Precision::kDepth * kPixelBytes + kLine - 1) / kLine * kLine;
  static constexpr int kStageBytes = kInputBytes + kGradientBytes;

  // Where unit `unit` of a pixel in column `column` stands. In 128 bytes are kLine / kPixelBytes pixels, whose units
  // are in different banks already.
  static constexpr int kUnits = kChannels / 8, kUnitBytes = 8 * Precision::kBytes;
  static constexpr int kApart = kLine / kUnitBytes;  // neighbouring pixels that are read at once
  static constexpr int kTurns = kUnits < kApart ? kUnits : kApart, kAlike = kApart / kTurns;
  WNFUSED_HOST_DEVICE static constexpr int turned(int unit, int column) {
    return unit ^ static_cast<int>(static_cast<unsigned>(column) / kAlike % kTurns);
  }

  // Split fragments take twice the registers, and what gathers its values the more loads: larger tiles use them better.
  static constexpr bool kSplits = sizeof(typename Precision::Fragment) > 16;
  static constexpr bool kIsLarge = kSplits ? kChannels == 32 : Precision::kBytes == 4 && kChannels == 64;
  static constexpr int kTileRows = kIsLarge ? 32 : 16, kTileFragments = kTileRows / 16;
  static constexpr int kRowTiles = kChannels / kTileRows, kColumnTiles = kChannels / 16;
  static constexpr int kWarps = kRowTiles * kColumnTiles * kSplit, kThreads = 32 * kWarps;
  static constexpr int kBlocksPerMultiprocessor = kSplits || kTileRows > 16 || kThreads > 256 ? 1 : 2;

  // Runs of rows. kPairsRows: a k-step is two rows.
  static constexpr bool kPairsRows = !kSplits && 2 * kWidth == Precision::kDepth && kRows % 2 == 0;
  static constexpr bool kIsRegular = !kSplits && (kWidth % Precision::kDepth == 0 || kPairsRows);
  static constexpr int kSegments = kPairsRows ? 1 : kWidth / Precision::kDepth;
  static constexpr int kRun = kRows % 4 == 0 ? (Precision::kBytes == 4 ? 2 : 4) : kRows;
  static constexpr int kRuns = kIsRegular ? kImages * kSegments * (kRows / kRun) : 0;

  // Afterwards the same memory holds kTileRows rows of dw, summed over the warps that share them, and their bias sums.
  static constexpr int kRowSize = kChannels * 9;
  static constexpr int kSumBytes = kTileRows * (kRowSize + 1) * 4;
  static constexpr int kSharedBytes = kStages * kStageBytes > kSumBytes ? kStages * kStageBytes : kSumBytes;
};

}  // namespace wnfused::gpu

// The inner loops of a stage: one chunk of taps of one convolution, from shared memory into the warp's sums.
#pragma once

#include "cuda/stage_tile.h"

namespace wnfused::gpu {

// The B fragments of `tap` of a chunk and 16 or 8 input channels, for all columns of this warp.
template <class Config>
WNFUSED_DEVICE void load_weights(typename Config::Precision::Fragment (&fragments)[Config::kColumns / 2],
                                 const char* chunk, int tap, int depth, const WarpTile<Config>& warp) {
  constexpr int kDepths = Config::kChannels / Config::Precision::kDepth;
  const int first = (tap * kDepths + depth) * (Config::kChannels / 16) + warp.first_channel / 16;
#pragma unroll
  for (int j = 0; j < Config::kColumns / 2; ++j) {
    const Bytes16 raw = load_shared<Bytes16>(chunk + ((first + j) * 32 + lane_index()) * 16);
    fragments[j] = Config::Precision::fragment(raw.word);
  }
}

template <class Config>
WNFUSED_DEVICE typename Config::Precision::Fragment load_pixels(const char* row) {
  uint32_t raw[4];
  load_matrices(raw, row);
  return Config::Precision::fragment(raw);
}

// The sums of one tile of pixels += these pixels times one tap and 16 or 8 input channels, for all columns of this
// warp.
template <class Config>
WNFUSED_DEVICE void multiply_tile(float (&sums)[Config::kColumns][4],
                                  const typename Config::Precision::Fragment& pixels,
                                  const typename Config::Precision::Fragment (&weights)[Config::kColumns / 2]) {
#pragma unroll
  for (int j = 0; j < Config::kColumns; ++j) Config::Precision::multiply(sums[j], pixels, weights[j / 2], j % 2);
}

// Fragments of one row of 16 pixels and more are multiplied by all three taps of a column: tap ky takes row r of the
// operand to output row r - ky.
template <class Config>
WNFUSED_DEVICE void multiply_rows(Sums<Config>& sums, const char* pixels,
                                  const typename Config::Precision::Fragment (&weights)[3][Config::kColumns / 2]) {
  constexpr int kTilesPerRow = Config::kWidth / 16, kRows = Config::kTiles / kTilesPerRow;
#pragma unroll
  for (int row = 0; row < kRows + 2; ++row)
#pragma unroll
    for (int tile = 0; tile < kTilesPerRow; ++tile) {
      const auto fragment = load_pixels<Config>(pixels + (row * Config::kPaddedWidth + tile * 16) * 16);
#pragma unroll
      for (int ky = 0; ky < 3; ++ky) {
        const int output_row = row - ky;
        if (output_row < 0 || output_row >= kRows) continue;
        multiply_tile<Config>(sums[output_row * kTilesPerRow + tile], fragment, weights[ky]);
      }
    }
}

// The same for rows of 8 pixels, of which a tile has two: a fragment's registers 0 and 2 are the upper one, 1 and 3 the
// lower. The pair of rows from row 2 p on is tile p for tap 0 and tile p - 1 for tap 2, and what tile p - 1 needs for
// tap 1 is the lower row of the pair before with the upper one of this.
template <class Config>
WNFUSED_DEVICE void multiply_row_pairs(Sums<Config>& sums, const char* pixels,
                                       const typename Config::Precision::Fragment (&weights)[3][Config::kColumns / 2]) {
  uint32_t before[4] = {};
#pragma unroll
  for (int pair = 0; pair <= Config::kTiles; ++pair) {
    uint32_t rows[4];
    load_matrices(rows, pixels + 2 * pair * Config::kPaddedWidth * 16);
    const auto both = Config::Precision::fragment(rows);
    if (pair < Config::kTiles) multiply_tile<Config>(sums[pair], both, weights[0]);
    if (pair > 0) {
      const uint32_t between[4] = {before[1], rows[0], before[3], rows[2]};
      multiply_tile<Config>(sums[pair - 1], Config::Precision::fragment(between), weights[1]);
      multiply_tile<Config>(sums[pair - 1], both, weights[2]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) before[i] = rows[i];
  }
}

// One column of three taps.
template <class Config>
WNFUSED_DEVICE void multiply_column(Sums<Config>& sums, const char* pixels, const char* chunk, int column_in_chunk,
                                    const WarpTile<Config>& warp) {
  constexpr int kDepths = Config::kChannels / Config::Precision::kDepth;
#pragma unroll
  for (int depth = 0; depth < kDepths; ++depth) {
    typename Config::Precision::Fragment weights[3][Config::kColumns / 2];
#pragma unroll
    for (int ky = 0; ky < 3; ++ky) load_weights<Config>(weights[ky], chunk, 3 * column_in_chunk + ky, depth, warp);
    const char* plane = pixels + 2 * depth * Config::kPlaneBytes;
    if constexpr (Config::kWidth == 8)
      multiply_row_pairs<Config>(sums, plane, weights);
    else
      multiply_rows<Config>(sums, plane, weights);
  }
}

// One tap after the other, for any map.
template <class Config>
WNFUSED_DEVICE void multiply_tap(Sums<Config>& sums, const char* operand, const char* chunk, int tap_in_chunk, int tap,
                                 const WarpTile<Config>& warp) {
  constexpr int kDepths = Config::kChannels / Config::Precision::kDepth;
  [[maybe_unused]] constexpr int kUnroll = Config::kSplits ? 1 : kDepths;
  const int row = lane_index() % 16;
  const char* plane = operand + lane_index() / 16 * Config::kPlaneBytes + Config::tap_shift(tap) * 16;
#pragma unroll kUnroll
  for (int depth = 0; depth < kDepths; ++depth) {
    typename Config::Precision::Fragment weights[Config::kColumns / 2];
    load_weights<Config>(weights, chunk, tap_in_chunk, depth, warp);
#pragma unroll
    for (int i = 0; i < Config::kTiles; ++i) {
      const auto fragment =
          load_pixels<Config>(plane + 2 * depth * Config::kPlaneBytes + warp.window(i, row) * 16);
      multiply_tile<Config>(sums[i], fragment, weights);
    }
  }
}

// sums += the convolution of `operand` with taps chunk_index * kChunkTaps and following. Lanes 0 to 15 address 16
// pixels of the first 16 bytes of a k-step's channels, lanes 16 to 31 the same pixels of the next.
template <class Config>
WNFUSED_DEVICE void multiply_chunk(Sums<Config>& sums, const char* operand, const char* chunk, int chunk_index,
                                   const WarpTile<Config>& warp) {
  const int first_tap = chunk_index * Config::kChunkTaps;
  if constexpr (Config::kReusesRows) {
    const char* pixels = operand + lane_index() / 16 * Config::kPlaneBytes +
                         (warp.window(0, lane_index() % 16) + first_tap / 3) * 16;
#pragma unroll
    for (int column = 0; column < Config::kChunkTaps / 3; ++column)
      multiply_column<Config>(sums, pixels + column * 16, chunk, column, warp);
  } else {
#pragma unroll 1
    for (int tap = 0; tap < Config::kChunkTaps; ++tap)
      multiply_tap<Config>(sums, operand, chunk, tap, first_tap + tap, warp);
  }
}

}  // namespace wnfused::gpu

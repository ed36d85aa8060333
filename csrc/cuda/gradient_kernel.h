// The weight gradient of all convolutions of a stage in one launch: a block of threads takes one convolution and one slice
// of the batch, sums over its items in their order, and ends with the weight-norm backward (gradient_rows.h), or, where
// the batch is cut into slices because there are few convolutions, with partial sums that GradientSumKernel adds up.
// No atomics: the same bits in every run. gradient_config.h has the layouts.
//
// Floor a convolution and image: 18 C^2 H W FLOP, and both maps once through shared memory.
#pragma once

#include "cuda/gradient_config.h"
#include "cuda/gradient_rows.h"

namespace wnfused::gpu {

template <class Config>
struct GradientKernel {
  using Params = GradientParams;
  using Precision = typename Config::Precision;
  using Fragment = typename Precision::Fragment;
  static constexpr int kThreads = Config::kThreads, kSharedBytes = Config::kSharedBytes;
  static constexpr int kBlocksPerMultiprocessor = 1;
  static constexpr int kRowSize = Config::kRowSize;

  WNFUSED_DEVICE static void run(const Params& params, char* shared) {
    GradientKernel kernel(params, shared);
    kernel.clear();
    block_barrier();
    for (int ahead = 0; ahead < Config::kStages - 1; ++ahead) kernel.fetch(kernel.first_item + ahead);
    for (int item = kernel.first_item; item < kernel.last_item; ++item) {
      wait_copies<Config::kStages - 2>();
      block_barrier();
      kernel.fetch(item + Config::kStages - 1);
      kernel.accumulate(kernel.stage_of(item));
    }
    wait_copies<0>();
    block_barrier();
    for (int tile = 0; tile < Config::kRowTiles; ++tile) kernel.finish_rows(tile);
  }

 private:
  const Params& params;
  char* shared;
  int conv, slice, first_item, last_item;      // items: images or groups of them, each in bands
  int row_tile, column_tile, turn;             // which tile of dw is this warp's, and which k-steps
  float sums[9][Config::kTileFragments][2][4];
  float bias_sums[Config::kTileFragments][2];  // of rows lane / 4 and lane / 4 + 8 of a fragment

  WNFUSED_DEVICE GradientKernel(const Params& params, char* shared) : params(params), shared(shared) {
    conv = block_index() / params.slices;
    slice = block_index() % params.slices;
    const int groups = (params.images + Config::kImages - 1) / Config::kImages, items = groups * Config::kBands;
    const int share = (items + params.slices - 1) / params.slices;
    first_item = slice * share < items ? slice * share : items;
    last_item = first_item + share < items ? first_item + share : items;
    const int warp = thread_index() / 32;
    column_tile = warp % Config::kColumnTiles;
    row_tile = warp / Config::kColumnTiles % Config::kRowTiles;
    turn = warp / (Config::kColumnTiles * Config::kRowTiles);
#pragma unroll
    for (int m = 0; m < Config::kTileFragments; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bias_sums[m][i / 2] = 0.0f;
#pragma unroll
        for (int tap = 0; tap < 9; ++tap) sums[tap][m][0][i] = sums[tap][m][1][i] = 0.0f;
      }
  }

  // --------------------------------------------------------------------------------------------------- items

  WNFUSED_DEVICE char* stage_of(int item) const { return shared + item % Config::kStages * Config::kStageBytes; }

  // Zeros, which the left and right border and the pixels past the last one keep.
  WNFUSED_DEVICE void clear() const {
    for (int i = thread_index() * 16; i < Config::kStages * Config::kStageBytes; i += kThreads * 16)
      store_shared(shared + i, Bytes16{});
  }

  // Where a thread's copies go is found anew for every item: the registers are the sums'.
  WNFUSED_DEVICE void fetch(int item) const {
    if (item < last_item) {
      const int image = item / Config::kBands * Config::kImages;
      const int first_row = item % Config::kBands * Config::kRows;
      const int64_t map = (static_cast<int64_t>(conv) * params.images + image) * Config::kMap * Config::kPlanes * 16;
      fetch_gradients(stage_of(item) + Config::kInputBytes, params.gradients + map, image, first_row);
      fetch_inputs(stage_of(item), params.inputs + map, image, first_row);
    }
    commit_copies();
  }

  WNFUSED_DEVICE void fetch_gradients(char* to, const char* maps, int image, int first_row) const {
    for (int i = computed_again(thread_index()); i < Config::kPixels * Config::kPlanes; i += kThreads) {
      const int plane = i % Config::kPlanes, pixel = i / Config::kPlanes;
      const bool inside = Config::kImages == 1 || image + pixel / Config::kMap < params.images;
      const int from = (first_row * Config::kWidth + pixel) * Config::kPlanes + plane;
      copy_async(to + plane * Config::kGradientPlaneBytes + pixel * 16, inside ? maps + from * 16 : maps, inside);
    }
  }

  // A band needs the row above it and the one below; those outside the map are zeros, which whole maps have already.
  WNFUSED_DEVICE void fetch_inputs(char* to, const char* maps, int image, int first_row) const {
    constexpr int kHalo = Config::kBands > 1 ? 1 : 0, kRows = Config::kRows + 2 * kHalo;
    constexpr int kBand = kRows * Config::kWidth;
    for (int i = computed_again(thread_index()); i < Config::kImages * kBand * Config::kPlanes; i += kThreads) {
      const int plane = i % Config::kPlanes, pixel = i / Config::kPlanes;
      const int number = pixel / kBand, row = pixel % kBand / Config::kWidth - kHalo, column = pixel % Config::kWidth;
      const int map_row = first_row + row;
      const bool inside = map_row >= 0 && map_row < Config::kHeight && image + number < params.images;
      const int from =
          ((number * Config::kHeight + map_row) * Config::kWidth + column) * Config::kPlanes + plane;
      const int place = number * Config::kPaddedBand + (row + 1) * Config::kPaddedWidth + column + 1;
      copy_async(to + plane * Config::kInputPlaneBytes + place * 16, inside ? maps + from * 16 : maps, inside);
    }
  }

  // ------------------------------------------------------------------------------------------------ products

  // A fragment whose depth is pixels and whose other side is 16 channels from `channel` on. `place(p)` is where pixel p of
  // the k-step stands in a plane. In an A fragment registers 0 and 1 differ in the channel, in a B fragment in the pixel.
  template <bool kIsA, class Place>
  WNFUSED_DEVICE static Fragment load_turned(const char* planes, int plane_bytes, int channel, const Place& place) {
    uint32_t raw[4];
    const int lane = lane_index();
    if constexpr (Precision::kBytes == 2) {
      const int matrix = lane / 8, upper = kIsA ? matrix % 2 : matrix / 2, later = kIsA ? matrix / 2 : matrix % 2;
      load_matrices_transposed(raw, planes + (channel / 8 + upper) * plane_bytes + place(8 * later + lane % 8) * 16);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int upper = kIsA ? i % 2 : i / 2, later = kIsA ? i / 2 : i % 2;
        const int n = channel + 8 * upper + lane / 4;
        raw[i] = load_shared<uint32_t>(planes + n / 4 * plane_bytes + place(4 * later + lane % 4) * 16 + n % 4 * 4);
      }
    }
    return Precision::fragment(raw);
  }

  WNFUSED_DEVICE static Fragment ones() {
    const uint32_t one = Precision::kBytes == 2 ? pack_bf16(1.0f, 1.0f) : bits_of_float(1.0f);
    const uint32_t raw[4] = {one, one, one, one};
    return Precision::fragment(raw);
  }

  WNFUSED_DEVICE void accumulate(const char* inputs) {
    const char* gradients = inputs + Config::kInputBytes;
#pragma unroll 1
    for (int step = turn; step < Config::kSteps; step += Config::kSplit) {
      const int first = step * Precision::kDepth;
      Fragment g[Config::kTileFragments];
#pragma unroll
      for (int m = 0; m < Config::kTileFragments; ++m) {
        g[m] = load_turned<true>(gradients, Config::kGradientPlaneBytes, row_tile * Config::kTileRows + 16 * m,
                                 [&](int pixel) { return first + pixel; });
        if (column_tile == 0) {
          float columns[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // all the same
          Precision::multiply(columns, g[m], ones(), 0);
          bias_sums[m][0] += columns[0];
          bias_sums[m][1] += columns[2];
        }
      }
#pragma unroll
      for (int tap = 0; tap < 9; ++tap) {
        const Fragment x =
            load_turned<false>(inputs, Config::kInputPlaneBytes, column_tile * 16, [&](int pixel) {
              // Past the last pixel g is zero and any pixel will do.
              const bool past = Config::kPixels % Precision::kDepth != 0 && first + pixel >= Config::kPixels;
              return Config::window(past ? 0 : first + pixel) + tap / 3 * Config::kPaddedWidth + tap % 3;
            });
#pragma unroll
        for (int m = 0; m < Config::kTileFragments; ++m)
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) Precision::multiply(sums[tap][m][tile], g[m], x, tile);
      }
    }
  }

  // ---------------------------------------------------------------------------------------------------- rows

  // A row of dw in shared memory: [16 input channels of a tile .. C][9 taps], then its bias sum.
  WNFUSED_DEVICE char* sum_at(int row, int place) const { return shared + (row * (kRowSize + 1) + place) * 4; }

  WNFUSED_DEVICE void add_sum(int row, int place, float value) const {
    char* address = sum_at(row, place);
    store_shared(address, turn == 0 ? value : load_shared<float>(address) + value);
  }

  // Adds up the warps that share a tile, in their order, and finishes kTileRows rows.
  WNFUSED_DEVICE void finish_rows(int tile) const {
    const int lane = lane_index();
    for (int contributor = 0; contributor < Config::kSplit; ++contributor) {
      if (row_tile == tile && turn == contributor) {
#pragma unroll
        for (int m = 0; m < Config::kTileFragments; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = 16 * m + lane / 4 + i / 2 * 8;
#pragma unroll
            for (int tap = 0; tap < 9; ++tap)
#pragma unroll
              for (int column = 0; column < 2; ++column)
                add_sum(row, (column_tile * 16 + column * 8 + lane % 4 * 2 + i % 2) * 9 + tap, sums[tap][m][column][i]);
            if (column_tile == 0 && lane % 4 == 0 && i % 2 == 0) add_sum(row, kRowSize, bias_sums[m][i / 2]);
          }
        }
      }
      block_barrier();
    }
    for (int row = thread_index() / 32; row < Config::kTileRows; row += Config::kWarps) {
      const int64_t n = static_cast<int64_t>(conv) * Config::kChannels + tile * Config::kTileRows + row;
      const auto value = [&](int, int q) { return load_shared<float>(sum_at(row, q)); };
      const float bias_sum = load_shared<float>(sum_at(row, kRowSize));
      if (params.partial)
        store_partial(n, value, bias_sum);
      else
        store_row<kRowSize>(params, n, value, bias_sum);
    }
    block_barrier();
  }

  template <class Value>
  WNFUSED_DEVICE void store_partial(int64_t n, const Value& value, float bias_sum) const {
    float* to = params.partial + (static_cast<int64_t>(slice) * params.convs * Config::kChannels + n) * (kRowSize + 1);
    for_each_value<kRowSize>([&](int j, int q) { store_global(to + q, value(j, q)); });
    if (lane_index() == 0) store_global(to + kRowSize, bias_sum);
  }
};

}  // namespace wnfused::gpu

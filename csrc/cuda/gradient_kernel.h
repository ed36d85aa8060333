// The weight gradient of all convolutions of a stage in one launch: a block of threads takes one convolution and one
// slice of the batch, sums over its items in their order, and ends with the weight-norm backward (gradient_rows.h), or,
// where the batch is cut into slices because there are few convolutions, with partial sums that GradientSumKernel adds
// up. No atomics: the same bits in every run. gradient_config.h has the layouts.
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
  static constexpr int kBlocksPerMultiprocessor = Config::kBlocksPerMultiprocessor;
  static constexpr int kRowSize = Config::kRowSize;
  static constexpr int kAtOnce =
      Config::kSplits ? 1 : 3;  // values of a row: other tiles' sums still have the registers

  WNFUSED_DEVICE static void run(const Params& params, char* shared) {
    GradientKernel kernel(params, shared);
    kernel.clear();
    block_barrier();
    for (int ahead = 0; ahead < Config::kStages - 1; ++ahead) kernel.fetch(kernel.first_item + ahead);
#pragma unroll 1
    for (int item = kernel.first_item; item < kernel.last_item; ++item) {
      wait_copies<Config::kStages - 2>();
      block_barrier();
      kernel.fetch(item + Config::kStages - 1);
      kernel.accumulate(kernel.stage_of(item));
    }
    wait_copies<0>();
    block_barrier();
#pragma unroll 1
    for (int tile = 0; tile < Config::kRowTiles; ++tile) kernel.finish_rows(tile);
  }

 private:
  const Params& params;
  char* shared;
  int first_item, last_item;                   // images or groups of them, each in bands
  float sums[9][Config::kTileFragments][2][4];
  float bias_sums[Config::kTileFragments][4];  // all columns the same

  WNFUSED_DEVICE GradientKernel(const Params& params, char* shared) : params(params), shared(shared) {
    const int groups = (params.images + Config::kImages - 1) / Config::kImages, items = groups * Config::kBands;
    const int share = (items + params.slices - 1) / params.slices;
    first_item = slice() * share < items ? slice() * share : items;
    last_item = first_item + share < items ? first_item + share : items;
#pragma unroll
    for (int m = 0; m < Config::kTileFragments; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bias_sums[m][i] = 0.0f;
#pragma unroll
        for (int tap = 0; tap < 9; ++tap) sums[tap][m][0][i] = sums[tap][m][1][i] = 0.0f;
      }
  }

  // What is a few instructions away is found where it is needed: the registers are the sums'.
  WNFUSED_DEVICE int conv() const { return computed_again(block_index()) / params.slices; }
  WNFUSED_DEVICE int slice() const { return computed_again(block_index()) % params.slices; }

  // Which tile of dw is this warp's, and which of the k-steps.
  WNFUSED_DEVICE static int warp() { return computed_again(thread_index()) / 32; }
  WNFUSED_DEVICE static int column_tile() { return warp() % Config::kColumnTiles; }
  WNFUSED_DEVICE static int row_tile() { return warp() / Config::kColumnTiles % Config::kRowTiles; }
  WNFUSED_DEVICE static int turn() { return warp() / (Config::kColumnTiles * Config::kRowTiles); }

  // --------------------------------------------------------------------------------------------------- items

  WNFUSED_DEVICE char* stage_of(int item) const { return shared + item % Config::kStages * Config::kStageBytes; }

  // Zeros, which the left and right border and the pixels past the last one keep.
  WNFUSED_DEVICE void clear() const {
    for (int i = thread_index() * 16; i < Config::kStages * Config::kStageBytes; i += kThreads * 16)
      store_shared(shared + i, Bytes16{});
  }

  WNFUSED_DEVICE void fetch(int item) const {
    if (item < last_item) {
      const int image = item / Config::kBands * Config::kImages;
      const int first_row = item % Config::kBands * Config::kRows;
      const int64_t map = (static_cast<int64_t>(conv()) * params.images + image) * Config::kMap * Config::kPixelBytes;
      fetch_rows<false>(stage_of(item) + Config::kInputBytes, params.gradients + map, image, first_row);
      fetch_rows<true>(stage_of(item), params.inputs + map, image, first_row);
    }
    commit_copies();
  }

  // The item's rows of a map, or all of its maps. kThreads / kLanes rows are copied at a time, 16 bytes a thread. A
  // band of x needs the row above it and the one below; those outside the map are zeros, which whole maps have already.
  template <bool kIsInput>
  WNFUSED_DEVICE void fetch_rows(char* to, const char* maps, int image, int first_row) const {
    constexpr int kHalo = kIsInput && Config::kBands > 1 ? 1 : 0, kRows = Config::kRows + 2 * kHalo;
    constexpr int kPieces = Config::kPixelBytes / 16, kUnitPieces = Config::kUnitBytes / 16;
    constexpr int kLanes = power_of_two(Config::kWidth * kPieces);
    static_assert(kThreads % kLanes == 0);
    const unsigned thread = computed_again(thread_index());
    const int piece = thread % kPieces, column = thread % kLanes / kPieces;
    if (column >= Config::kWidth) return;
#pragma unroll 1
    for (int i = thread / kLanes; i < Config::kImages * kRows; i += kThreads / kLanes) {
      const int number = Config::kImages > 1 ? i / kRows : 0, row = i - number * kRows - kHalo;
      const int map_row = first_row + row;
      const bool inside = map_row >= 0 && map_row < Config::kHeight && image + number < params.images;
      const int from = (number * Config::kMap + map_row * Config::kWidth + column) * Config::kPixelBytes + piece * 16;
      const int place = kIsInput ? number * Config::kPaddedBand + (row + 1) * Config::kPitch + Config::kBorder + column
                                 : i * Config::kWidth + column;
      const int turn = kIsInput ? Config::kBorder + column : Config::kWidth % Config::kApart == 0 ? column : place;
      const int unit = Config::turned(piece / kUnitPieces, turn);
      copy_async(to + place * Config::kPixelBytes + unit * Config::kUnitBytes + piece % kUnitPieces * 16,
                 inside ? maps + from : maps, inside);
    }
  }

  WNFUSED_DEVICE static constexpr int power_of_two(int least) {
    int power = 1;
    while (power < least) power *= 2;
    return power;
  }

  // ------------------------------------------------------------------------------------------------ products

  // Where a lane's part of a fragment stands, relative to the pixels it is loaded from: bf16 has one place, the row of
  // an ldmatrix; tf32 two, that of its first four pixels and that of the others, in the first of two units.
  static constexpr int kPlaces = Precision::kBytes == 2 ? 1 : 2;
  struct Places {
    int offset[kPlaces];
  };

  // A pixel in shared memory and the column that its units are turned by.
  struct Spot {
    int pixel, column;
  };

  // Of a fragment whose depth is pixels and whose other side is 16 channels from `channel` on. `spot_of(p)` is where
  // pixel p of the k-step stands. In an A fragment registers 0 and 1 differ in the channel, in a B fragment in the
  // pixel.
  template <bool kIsA, class SpotOf>
  WNFUSED_DEVICE static Places places(int channel, const SpotOf& spot_of) {
    Places found;
    const int lane = computed_again(lane_index()), matrix = lane / 8;
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      const int upper = kPlaces > 1 ? 0 : kIsA ? matrix % 2 : matrix / 2;
      const int later = kPlaces > 1 ? i : kIsA ? matrix / 2 : matrix % 2;
      const Spot spot = spot_of(kPlaces > 1 ? 4 * later + lane % 4 : 8 * later + lane % 8);
      found.offset[i] = spot.pixel * Config::kPixelBytes +
                        Config::turned(channel / 8 + upper, spot.column) * Config::kUnitBytes +
                        (kPlaces > 1 ? lane / 4 * 4 : 0);
    }
    return found;
  }

  template <bool kIsA>
  WNFUSED_DEVICE static Fragment load_turned(const char* pixels, const Places& places) {
    uint32_t raw[4];
    if constexpr (kPlaces == 1) {
      load_matrices_transposed(raw, pixels + places.offset[0]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int upper = kIsA ? i % 2 : i / 2, later = kIsA ? i / 2 : i % 2;
        // The second unit is the first one's neighbour on either side: found again where it is used, to save registers.
        const int first = Config::kIsRegular ? computed_again(places.offset[0]) : places.offset[later];
        const int aside = Config::kUnitBytes - 2 * (first & Config::kUnitBytes);
        raw[i] = load_shared<uint32_t>(pixels + places.offset[later] + (upper ? aside : 0));
      }
    }
    return Precision::fragment(raw);
  }

  WNFUSED_DEVICE static Fragment ones() {
    const uint32_t one = Precision::kBytes == 2 ? pack_bf16(1.0f, 1.0f) : bits_of_float(1.0f);
    const uint32_t raw[4] = {one, one, one, one};
    return Precision::fragment(raw);
  }

  // The k-step of g at `pixels`, in all rows of this warp's tile.
  WNFUSED_DEVICE void load_gradients(Fragment (&g)[Config::kTileFragments], const char* pixels, const Places& places) {
#pragma unroll
    for (int m = 0; m < Config::kTileFragments; ++m) {
      // 16 channels on are two units on, which turn like the first.
      Places own = places;
#pragma unroll
      for (int& offset : own.offset) offset ^= 2 * m * Config::kUnitBytes;
      g[m] = load_turned<true>(pixels, own);
      if (column_tile() == 0) Precision::multiply(bias_sums[m], g[m], ones(), 0);
    }
  }

  WNFUSED_DEVICE void multiply(int tap, const Fragment (&g)[Config::kTileFragments], const Fragment& x) {
#pragma unroll
    for (int m = 0; m < Config::kTileFragments; ++m)
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) Precision::multiply(sums[tap][m][tile], g[m], x, tile);
  }

  WNFUSED_DEVICE void accumulate(const char* inputs) {
    if constexpr (Config::kIsRegular)
      accumulate_runs(inputs, inputs + Config::kInputBytes);
    else
      accumulate_steps(inputs, inputs + Config::kInputBytes);
  }

  static constexpr int kRowBytes = Config::kPitch * Config::kPixelBytes;

  WNFUSED_DEVICE void accumulate_runs(const char* inputs, const char* gradients) {
    constexpr int kWidth = Config::kPairsRows ? Config::kWidth : Precision::kDepth;  // of a k-step
    Places x_places[3];
#pragma unroll
    for (int kx = 0; kx < 3; ++kx)
      x_places[kx] = places<false>(column_tile() * 16, [&](int pixel) {
        const int column = Config::kBorder - 1 + kx + pixel % kWidth;
        return Spot{pixel / kWidth * Config::kPitch + column, column};
      });
    const Places g_places =
        places<true>(row_tile() * Config::kTileRows, [](int pixel) { return Spot{pixel, pixel}; });
#pragma unroll 1
    for (int run = turn(); run < Config::kRuns; run += Config::kSplit) {
      const int segment = run % Config::kSegments * Precision::kDepth, row = run / Config::kSegments * Config::kRun;
      const int image = row / Config::kRows;
      const char* x = inputs + ((row + 2 * image) * Config::kPitch + segment) * Config::kPixelBytes;
      const char* g = gradients + (row * Config::kWidth + segment) * Config::kPixelBytes;
      if constexpr (Config::kPairsRows)
        go_down_pairs(x, g, x_places, g_places);
      else
        go_down(x, g, x_places, g_places);
    }
  }

  // Row y of x meets rows y, y - 1 and y - 2 of g.
  WNFUSED_DEVICE void go_down(const char* x, const char* gradients, const Places (&x_places)[3],
                              const Places& g_places) {
    Fragment g[3][Config::kTileFragments];
#pragma unroll
    for (int y = 0; y < Config::kRun + 2; ++y) {
      if (y < Config::kRun) load_gradients(g[y % 3], gradients + y * Config::kWidth * Config::kPixelBytes, g_places);
#pragma unroll
      for (int kx = 0; kx < 3; ++kx) {
        const Fragment fragment = load_turned<false>(x + y * kRowBytes, x_places[kx]);
#pragma unroll
        for (int ky = 0; ky < 3; ++ky) {
          const int row = y - ky;
          if (row >= 0 && row < Config::kRun) multiply(3 * ky + kx, g[row % 3], fragment);
        }
      }
    }
  }

  // As go_down where a k-step is two rows: rows 2 j - 1 and 2 j of x are put together from those loaded for 2 j - 2, 2
  // j - 1 and for 2 j, 2 j + 1.
  WNFUSED_DEVICE void go_down_pairs(const char* x, const char* gradients, const Places (&x_places)[3],
                                    const Places& g_places) {
    constexpr int kPairs = Config::kRun / 2;
    Fragment g[kPairs][Config::kTileFragments];
#pragma unroll
    for (int j = 0; j < kPairs; ++j)
      load_gradients(g[j], gradients + j * Precision::kDepth * Config::kPixelBytes, g_places);
#pragma unroll
    for (int kx = 0; kx < 3; ++kx) {
      Fragment before;
#pragma unroll
      for (int j = 0; j <= kPairs; ++j) {
        const Fragment rows = load_turned<false>(x + 2 * j * kRowBytes, x_places[kx]);
        if (j < kPairs) multiply(kx, g[j], rows);
        if (j > 0) {
          multiply(3 + kx, g[j - 1], {{before.value[1], rows.value[0], before.value[3], rows.value[2]}});
          multiply(6 + kx, g[j - 1], rows);
        }
        before = rows;
      }
    }
  }

  // One k-step after the other, for any map.
  WNFUSED_DEVICE void accumulate_steps(const char* inputs, const char* gradients) {
#pragma unroll 1
    for (int step = turn(); step < Config::kSteps; step += Config::kSplit) {
      const int first = step * Precision::kDepth;
      Fragment g[Config::kTileFragments];
      load_gradients(g, gradients, places<true>(row_tile() * Config::kTileRows, [&](int pixel) {
                       return Spot{first + pixel, first + pixel};
                     }));
#pragma unroll
      for (int kx = 0; kx < 3; ++kx) {
        const int start = computed_again(first);
        const Places x_places = places<false>(column_tile() * 16, [&](int pixel) {
          // Past the last pixel g is zero and any pixel will do.
          const bool past = Config::kPixels % Precision::kDepth != 0 && start + pixel >= Config::kPixels;
          const int place = past ? 0 : start + pixel;
          const int column = Config::kBorder - 1 + kx + place % Config::kWidth, row = place / Config::kWidth;
          return Spot{(row + row / Config::kRows * 2) * Config::kPitch + column, column};
        });
#pragma unroll
        for (int ky = 0; ky < 3; ++ky)
          multiply(3 * ky + kx, g, load_turned<false>(inputs + ky * kRowBytes, x_places));
      }
    }
  }

  // ---------------------------------------------------------------------------------------------------- rows

  // A row of dw in shared memory: [16 input channels of a tile .. C][9 taps], then its bias sum.
  WNFUSED_DEVICE char* sum_at(int row, int place) const { return shared + (row * (kRowSize + 1) + place) * 4; }

  WNFUSED_DEVICE void add_sum(int row, int place, float value) const {
    char* address = sum_at(row, place);
    store_shared(address, turn() == 0 ? value : load_shared<float>(address) + value);
  }

  // Adds up the warps that share a tile, in their order, and finishes kTileRows rows.
  WNFUSED_DEVICE void finish_rows(int tile) const {
    const int lane = lane_index();
    for (int contributor = 0; contributor < Config::kSplit; ++contributor) {
      if (row_tile() == tile && turn() == contributor) {
#pragma unroll
        for (int m = 0; m < Config::kTileFragments; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = 16 * m + lane / 4 + i / 2 * 8;
#pragma unroll
            for (int tap = 0; tap < 9; ++tap)
#pragma unroll
              for (int column = 0; column < 2; ++column)
                add_sum(row, (column_tile() * 16 + column * 8 + lane % 4 * 2 + i % 2) * 9 + tap,
                        sums[tap][m][column][i]);
            if (column_tile() == 0 && lane % 4 == 0 && i % 2 == 0) add_sum(row, kRowSize, bias_sums[m][i]);
          }
        }
      }
      block_barrier();
    }
    for (int row = thread_index() / 32; row < Config::kTileRows; row += Config::kWarps) {
      const int64_t n = static_cast<int64_t>(conv()) * Config::kChannels + tile * Config::kTileRows + row;
      const auto value = [&](int, int q) { return load_shared<float>(sum_at(row, q)); };
      const float bias_sum = load_shared<float>(sum_at(row, kRowSize));
      if (params.partial)
        store_partial(n, value, bias_sum);
      else
        store_row<kRowSize, kAtOnce>(params, n, value, bias_sum);
    }
    block_barrier();
  }

  template <class Value>
  WNFUSED_DEVICE void store_partial(int64_t n, const Value& value, float bias_sum) const {
    float* to =
        params.partial + (static_cast<int64_t>(slice()) * params.convs * Config::kChannels + n) * (kRowSize + 1);
    for_each_value<kRowSize, kAtOnce>([&](int j, int q) { store_global(to + q, value(j, q)); });
    if (lane_index() == 0) store_global(to + kRowSize, bias_sum);
  }
};

}  // namespace wnfused::gpu

// What a block of threads of the residual stage's kernels holds of its images, and all it does to them but multiply:
//
//   forward    h <- skip_scale (h + conv_1(relu(conv_0(h) + b_0)) + b_1)                            block 0, 1, ...
//   backward   d <- skip_scale dh;  dh <- d + conv_0^T(relu'(a) conv_1^T(d))                       block B-1, B-2, ...
//
// The transposed convolutions are convolutions with flipped weights, so both directions are the same loop over 2 B
// convolutions: an even one (in the order of execution) ends in the ReLU or its mask, an odd one in the residual sum.
// stage_config.h has the picture of registers and shared memory. stage_kernel.h multiplies by mma, any width and
// precision; stage_warpgroup.h by wgmma.
//
// An image is one block of threads from the first block of the stage to the last, or a share of one, and no two blocks
// wait for each other's pixels. So a batch takes as long as ceil(images / (kImages multiprocessors)) of them, and fewer
// images than fill the chip leave the rest of it idle: splitting one would exchange borders after every convolution.
#pragma once

#include <type_traits>

#include "cuda/memory.h"
#include "cuda/stage_config.h"

namespace wnfused::gpu {

struct StageParams {
  const char* weights;      // packed convolutions in the order of execution
  const float* bias;        // [2 blocks, C], forward only
  ExternalMap input;        // x, or dy
  ExternalMap output;       // y, or dx; no data: not wanted
  char* operands;           // null, or where every convolution's operand is kept: [blocks, 2, images, H, W, C]
  uint8_t* signs;           // which activations are not zero: written by forward, or null; read by backward
  float* checkpoints;       // forward: null, or h before blocks 0, k, 2 k, ..: [.., images, H, W, C] in fp32
  int checkpoint_every;
  int blocks, images;
  float skip_scale;
};

// Of the signs of one image's activations: a bit each, of whole tiles of 64 pixels.
WNFUSED_HOST_DEVICE constexpr int64_t image_sign_bytes(int64_t channels, int64_t pixels) {
  return (pixels + 63) / 64 * 8 * channels;
}

// Each four bits of `low` followed by four of `high`, of which there are 16.
WNFUSED_DEVICE uint32_t interleaved(uint32_t low, uint32_t high) {
  const auto apart = [](uint32_t bits) {
    bits = (bits | bits << 8) & 0x00ff00ffu;
    return (bits | bits << 4) & 0x0f0f0f0fu;
  };
  return apart(low) | apart(high) << 4;
}

template <class Config>
using Sums = float[Config::kTiles][Config::kColumns][4];

template <class Config, bool kBackward>
struct StageTile {
  using Params = StageParams;
  using Precision = typename Config::Precision;
  using Pair = typename Precision::Pair;
  static constexpr int kThreads = Config::kThreads, kBlocksPerMultiprocessor = 1, kImages = Config::kImages;

 protected:
  const Params& params;
  char* shared;
  int operand = 0, next_operand = (Config::kBuffers - 1) * Config::kOperandBytes;  // where they are in shared memory
  WarpTile<Config> warp;
  int64_t first_pixel;  // of this block of threads, in [images, H, W]
  int pixels;           // how many it has: fewer for the last one of a batch, none or less for one past it
  Sums<Config> sums, stream;

  WNFUSED_DEVICE StageTile(const Params& params, char* shared)
      : params(params), shared(shared), first_pixel(static_cast<int64_t>(block_index()) * Config::kPixels) {
    const int64_t left = static_cast<int64_t>(params.images) * Config::kMap - first_pixel;
    pixels = left < Config::kPixels ? static_cast<int>(left) : Config::kPixels;
  }

  // ------------------------------------------------------------------------------------------------ operands

  // Zeros everywhere: the border keeps them.
  WNFUSED_DEVICE void clear_operands() const {
    for (int i = thread_index() * 16; i < Config::kBuffers * Config::kOperandBytes; i += Config::kThreads * 16)
      store_shared(shared + i, Bytes16{});
  }

  // Visits the pairs of neighbouring channels that this lane holds: body(tile, column, half, row, channel), where the
  // pair stands in values 2 half and 2 half + 1 of the tile and belongs to row `row` of it.
  template <class Body>
  WNFUSED_DEVICE void for_each_pair(const Body& body) const {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < Config::kTiles; ++i)
#pragma unroll
      for (int j = 0; j < Config::kColumns; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          body(i, j, half, lane / 4 + 8 * half, warp.first_channel + 8 * j + lane % 4 * 2);
  }

  // Of a row of a tile, within this block of threads.
  WNFUSED_DEVICE int pixel_of(int tile, int row) const { return warp.first_pixel + 16 * tile + row; }

  // Whether it is a pixel of this batch.
  WNFUSED_DEVICE bool is_pixel(int tile, int row) const {
    return (!Config::kRagged && !Config::kEmptyBlocks && Config::kImages == 1) || pixel_of(tile, row) < pixels;
  }

  WNFUSED_DEVICE char* operand_at(int buffer, int tile, int row, int channel) const {
    return shared + buffer + channel / Precision::kVector * Config::kPlaneBytes +
           (warp.window(tile, row) + Config::kCentre) * 16 + channel % Precision::kVector * Precision::kBytes;
  }

  static constexpr int kPixelBytes = Config::kChannels * Precision::kBytes;

  // Where the maps of convolution `conv` have this block of threads' first pixel: [convs, images, H, W, C].
  WNFUSED_DEVICE int64_t map_offset(int conv) const {
    return (static_cast<int64_t>(conv) * params.images * Config::kMap + first_pixel) * kPixelBytes;
  }

  // The operand goes to global memory from shared memory, so that the stores are whole: 8 neighbouring threads take 4
  // pixels of 2 planes, which lie in different banks, and a warp 4 pixels of 8 planes or as many bytes of more pixels.
  // A thread stays with its plane; where the block's threads take whole rows of the map, it goes on by constants. In
  // fp32 these would take registers that the sums need.
  WNFUSED_DEVICE void keep_operand(int conv) const {
    constexpr int kStep = Config::kThreads / Config::kPlanes;  // pixels
    char* kept = params.operands + map_offset(conv);
    if constexpr (Precision::kIsBfloat16 && kStep % Config::kWidth == 0 &&
                  (Config::kMap % kStep == 0 || kStep % Config::kMap == 0)) {
      const int thread = Config::kSparesRegisters ? thread_index() : computed_again(thread_index());
      const int plane = plane_of(thread), first = pixel_of_copy(thread);
      const char* from = shared + operand + plane * Config::kPlaneBytes + Config::kCentre * 16;
      char* to = kept + first * kPixelBytes + plane * 16;
#pragma unroll
      for (int i = 0; i < Config::kPixels; i += kStep) {
        if (first + i >= pixels) break;
        const int window = Config::window(first) + Config::window(i);
        store_global(to + i * kPixelBytes, load_shared<Bytes16>(from + window * 16));
      }
    } else {
      for (int i = thread_index(); i < (Config::kPixels + 3) / 4 * 4 * Config::kPlanes; i += Config::kThreads) {
        const int plane = plane_of(i), pixel = pixel_of_copy(i);
        if (pixel >= pixels) continue;
        const char* from =
            shared + operand + plane * Config::kPlaneBytes + (Config::window(pixel) + Config::kCentre) * 16;
        store_global(kept + pixel * kPixelBytes + plane * 16, load_shared<Bytes16>(from));
      }
    }
  }

  // What copy `i` of keep_operand takes.
  WNFUSED_DEVICE static int plane_of(int i) { return i / 8 % (Config::kPlanes / 2) * 2 + i % 2; }
  WNFUSED_DEVICE static int pixel_of_copy(int i) { return i / 8 / (Config::kPlanes / 2) * 4 + i / 2 % 4; }

  WNFUSED_DEVICE void keep_checkpoint(int block) const {
    const int64_t checkpoint = block / params.checkpoint_every;
    const int64_t kept_pixels = checkpoint * params.images * Config::kMap + first_pixel;
    float* kept = params.checkpoints + kept_pixels * Config::kChannels;
    for_each_pair([&](int i, int j, int half, int row, int channel) {
      if (is_pixel(i, row))
        store_global(kept + pixel_of(i, row) * Config::kChannels + channel,
                     FloatPair{stream[i][j][2 * half], stream[i][j][2 * half + 1]});
    });
  }

  // ------------------------------------------------------------------------------------------- input, output

  // Of a value in an external map; `pixel` counts within this block of threads, whose first image is `image`.
  WNFUSED_DEVICE static int64_t offset(const ExternalMap& map, int64_t image, int pixel, int channel) {
    const int place = pixel % Config::kMap;
    return (image + pixel / Config::kMap) * map.image + channel * map.channel + place / Config::kWidth * map.row +
           place % Config::kWidth * map.column;
  }

  WNFUSED_DEVICE void load_input() {
    const float scale = kBackward && params.blocks > 0 ? params.skip_scale : 1.0f;
    const int64_t image = static_cast<int64_t>(block_index()) * Config::kImages;
    for_each_pair([&](int i, int j, int half, int row, int channel) {
      float value[2] = {0.0f, 0.0f};
      const bool inside = is_pixel(i, row);
      const int pixel = computed_again(pixel_of(i, row));
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if (inside) value[k] = scale * load_value(params.input.values, offset(params.input, image, pixel, channel + k));
        stream[i][j][2 * half + k] = value[k];
        sums[i][j][2 * half + k] = 0.0f;
      }
      if (inside) store_shared(operand_at(operand, i, row, channel), Precision::pack(value[0], value[1]));
    });
    if (!kBackward && params.checkpoints && params.blocks > 0) keep_checkpoint(0);
  }

  WNFUSED_DEVICE void store_output() const {
    const int64_t image = static_cast<int64_t>(block_index()) * Config::kImages;
    for_each_pair([&](int i, int j, int half, int row, int channel) {
      if (!is_pixel(i, row)) return;
      // Offsets must not stay in registers from load_input on over all the blocks, nor all of them at a time.
      const int pixel = computed_again(pixel_of(i, row));
#pragma unroll
      for (int k = 0; k < 2; ++k)
        store_value(params.output.values, offset(params.output, image, pixel, channel + k),
                    stream[i][j][2 * half + k]);
    });
  }

  // ---------------------------------------------------------------------------------------------- epilogues

  // The value of a sum, which starts again from zero.
  WNFUSED_DEVICE float take(int i, int j, int k) {
    const float value = sums[i][j][k];
    if constexpr (!Config::kStartsSums) sums[i][j][k] = 0.0f;
    return value;
  }

  // Which of a lane's activations are not zero, a bit each. Every configuration for the same maps keeps them in the
  // same order, [blocks, images, tiles of 64 pixels, C / 16, 32 lanes, 4 tiles of 16], so that a backward may be
  // another one's than its forward: a byte for what a lane has of 16 pixels and 16 channels, first the low values of
  // its four pairs and then the high ones. A word has up to four tiles, as many as stand side by side.
  // wnfused/ops/residual_stage.py writes them in this order for forwards that are no kernel's.
  static constexpr int kWordTiles = Config::kTiles % 4 == 0 ? 4 : Config::kTiles % 2 == 0 ? 2 : 1;
  static constexpr int kGroups = Config::kColumns / 2;
  static constexpr int64_t kImageSigns = image_sign_bytes(Config::kChannels, Config::kMap);
  using SignWord =
      std::conditional_t<kWordTiles == 4, uint32_t, std::conditional_t<kWordTiles == 2, uint16_t, uint8_t>>;
  static_assert(Config::kImages == 1 || Config::kMap % 64 == 0 || Config::kPixels <= 64);
  struct Signs {
    uint32_t word[Config::kTiles / kWordTiles][kGroups];
  };

  // Visits this lane's words, and where they are kept.
  template <class Body>
  WNFUSED_DEVICE void for_each_sign_word(int block, const Body& body) const {
    const int64_t image = static_cast<int64_t>(block) * params.images + block_index() * Config::kImages;
    uint8_t* signs = params.signs + image * kImageSigns + lane_index() * 4;
    // Found again where sums and stream leave no registers for it; a backward asks for its words ahead.
    const int first = kBackward && !Config::kSplits ? warp.first_pixel : computed_again(warp.first_pixel);
#pragma unroll
    for (int i = 0; i < Config::kTiles / kWordTiles; ++i)
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int tile = first / 16 + i * kWordTiles;
        const int place = tile / 4 * (Config::kChannels / 16) + warp.first_channel / 16 + group;
        if (is_pixel(i * kWordTiles, 0)) body(i, group, signs + place * 128 + tile % 4);
      }
  }

  WNFUSED_DEVICE Signs load_signs(int block) const {
    Signs signs{};
    for_each_sign_word(block, [&](int i, int group, const uint8_t* kept) {
      signs.word[i][group] = load_global<SignWord>(kept);
    });
    return signs;
  }

  // In `found` four tiles have all their low values before their high ones, as they come.
  using FoundSigns = uint32_t[(Config::kTiles + 3) / 4][kGroups];
  WNFUSED_DEVICE void store_signs(int block, const FoundSigns& found) const {
    for_each_sign_word(block, [&](int i, int group, uint8_t* kept) {
      constexpr uint32_t kMask = (1u << 4 * kWordTiles) - 1;
      const int first = i * kWordTiles;
      const uint32_t bits = found[first / 4][group] >> 4 * (first % 4);
      store_global(kept, static_cast<SignWord>(interleaved(bits & kMask, bits >> 16 & kMask)));
    });
  }

  // What the end of a convolution needs from global memory: the bias of this lane's channels, or, in a backward's first
  // convolution of a block, its signs. A kernel asks for it ahead of the products.
  struct Ending {
    float bias[Config::kColumns][2];
    Signs signs;
  };
  WNFUSED_DEVICE Ending load_ending(int step) const {
    Ending ending{};
    const int conv = conv_of(step);
    if constexpr (kBackward) {
      if (step % 2 == 0) ending.signs = load_signs(conv / 2);
    } else {
#pragma unroll
      for (int j = 0; j < Config::kColumns; ++j) {
        const int channel = warp.first_channel + 8 * j + lane_index() % 4 * 2;
        const FloatPair pair = load_global<FloatPair>(params.bias + conv * Config::kChannels + channel);
        ending.bias[j][0] = pair.low;
        ending.bias[j][1] = pair.high;
      }
    }
    return ending;
  }

  // relu(conv_0 + b_0), or relu'(a) conv_1^T.
  WNFUSED_DEVICE void finish_first(int conv, const Ending& ending) {
    [[maybe_unused]] FoundSigns found{};
    for_each_pair([&](int i, int j, int half, int row, int channel) {
      float value[2] = {take(i, j, 2 * half), take(i, j, 2 * half + 1)};
      const int pair = j % 2 * 2 + half;
      Pair packed;
      if constexpr (kBackward) {
        const uint32_t passes = ending.signs.word[i / kWordTiles][j / 2] >> (8 * (i % kWordTiles) + pair);
        packed = Precision::pack(passes & 1 ? value[0] : 0.0f, passes & 16 ? value[1] : 0.0f);
      } else {
        packed = Precision::pack_rectified(value[0] + ending.bias[j][0], value[1] + ending.bias[j][1]);
        found[i / 4][j / 2] |= Precision::are_positive(packed) << (4 * (i % 4) + pair);
      }
      if (is_pixel(i, row)) store_shared(operand_at(next_operand, i, row, channel), packed);
    });
    if (!kBackward && params.signs) store_signs(conv / 2, found);
  }

  // The residual sum. The gradient is scaled for the block that comes next, so not after the last one.
  WNFUSED_DEVICE void finish_second(int conv, bool last, const Ending& ending) {
    const float scale = kBackward && last ? 1.0f : params.skip_scale;
    for_each_pair([&](int i, int j, int half, int row, int channel) {
      float value[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        value[k] = stream[i][j][2 * half + k] + take(i, j, 2 * half + k);
        if constexpr (!kBackward) value[k] += ending.bias[j][k];
        value[k] *= scale;
        stream[i][j][2 * half + k] = value[k];
      }
      if (is_pixel(i, row))
        store_shared(operand_at(next_operand, i, row, channel), Precision::pack(value[0], value[1]));
    });
    const int block = conv / 2 + 1;
    if (!kBackward && params.checkpoints && !last && block % params.checkpoint_every == 0) keep_checkpoint(block);
  }

  // The convolution whose turn it is in the order of execution, numbered as in the network.
  WNFUSED_DEVICE int conv_of(int step) const { return kBackward ? 2 * params.blocks - 1 - step : step; }

  // Ends a convolution whose sums are done: its result is the next one's operand.
  WNFUSED_DEVICE void finish(int step, const Ending& ending) {
    if (step % 2 == 0)
      finish_first(conv_of(step), ending);
    else
      finish_second(conv_of(step), step + 1 == 2 * params.blocks, ending);
    const int finished = operand;
    operand = next_operand;
    next_operand = finished;
  }
};

}  // namespace wnfused::gpu

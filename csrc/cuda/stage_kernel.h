// The depth-persistent residual stage: one block of threads runs all residual blocks for its images (stage_tile.h).
//
// The ring: chunk i of all convolutions' weights, numbered through, goes to slot i % kSlots and is asked for kSlots - 1
// chunks ahead. The barrier at the start of a chunk says three things at once: the chunk has arrived for all threads,
// the operand is complete, and nobody reads the slot of the chunk before, which the next copy may overwrite.
#pragma once

#include "cuda/stage_conv.h"
#include "cuda/stage_pack.h"
#include "cuda/stage_tile.h"

namespace wnfused::gpu {

template <class Config, bool kBackward>
struct StageKernel : StageTile<Config, kBackward> {
  using Tile = StageTile<Config, kBackward>;
  using Params = StageParams;
  using Weights = FragmentWeights<typename Config::Precision, Config::kChannels>;
  static constexpr int kSharedBytes = Config::kSharedBytes;

  WNFUSED_DEVICE static void run(const Params& params, char* shared) {
    StageKernel kernel(params, shared);
    kernel.fill_ring();
    kernel.clear_operands();
    block_barrier();
    kernel.load_input();
#pragma unroll 1
    for (int step = 0; step < 2 * params.blocks; ++step) kernel.convolve(step);
    if (params.output.values.data) kernel.store_output();
  }

 private:
  using Tile::operand, Tile::params, Tile::shared, Tile::sums, Tile::warp;
  // Of the warps that share a scheduler, every fourth of the block, half store the operand before their products and
  // half after them: else all would store, and then all multiply. Split fragments are multiplied for so long that it is
  // the same.
  WNFUSED_DEVICE static bool keeps_first() {
    if constexpr (Config::kSplits) return true;
    return Config::kWarps > 4 && thread_index() / 128 % 2 == 0;
  }

  int chunk = 0;  // of all convolutions, the one in use

  WNFUSED_DEVICE StageKernel(const Params& params, char* shared) : Tile(params, shared) {}

  WNFUSED_DEVICE char* slot_of(int index) const {
    return shared + Config::kBuffers * Config::kOperandBytes + index % Config::kSlots * Config::kChunkBytes;
  }

  WNFUSED_DEVICE void fetch_chunk(int index) const {
    if (index < 2 * params.blocks * Config::kChunks) {
      constexpr int kStep = Config::kThreads * 16, kWhole = Config::kChunkBytes / kStep * kStep;
      const int first = thread_index() * 16;
      const char* from = params.weights + static_cast<int64_t>(index) * Config::kChunkBytes + first;
      char* to = slot_of(index) + first;
#pragma unroll
      for (int i = 0; i < kWhole; i += kStep) copy_async(to + i, from + i);
      if (kWhole + first < Config::kChunkBytes) copy_async(to + kWhole, from + kWhole);
    }
    commit_copies();  // a group for every chunk, also where nothing is left to fetch: waiting counts groups
  }

  WNFUSED_DEVICE void fill_ring() const {
    for (int index = 0; index < Config::kSlots - 1; ++index) fetch_chunk(index);
  }

  WNFUSED_DEVICE void convolve(int step) {
    const int conv = this->conv_of(step);
    typename Tile::Ending ending{};
    if (!Config::kSplits) ending = this->load_ending(step);  // ahead of its use, as registers allow
#pragma unroll 1
    for (int part = 0; part < Config::kChunks; ++part, ++chunk) {
      wait_copies<Config::kSlots - 2>();
      block_barrier();
      fetch_chunk(chunk + Config::kSlots - 1);
      const bool keeps = part == 0 && params.operands;
      if (keeps && keeps_first()) this->keep_operand(conv);
      multiply_chunk<Config>(sums, shared + operand, slot_of(chunk), part, warp);
      if (keeps && !keeps_first()) this->keep_operand(conv);
    }
    if (Config::kBuffers == 1) block_barrier();  // every warp has read the operand that is overwritten now
    if (Config::kSplits) ending = this->load_ending(step);
    this->finish(step, ending);
  }
};

}  // namespace wnfused::gpu

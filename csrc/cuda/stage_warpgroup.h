// The residual stage of 64 channels on 8 x 8 maps in bf16 by wgmma: sm_90a. One warpgroup has one image, whose 64 pixels
// are the 64 rows of a product; a convolution is 9 taps of 4 products of 64 x 64 x 16, both operands in shared memory.
//
//   a            the operand as stage_config.h has it, [8 planes][10][10][8]: 8 pixels of a row of the map are the 8 rows of
//                16 bytes that wgmma reads, the next row of the map is the next 8, the next plane the next 8 values of k.
//                A tap moves the start and nothing else
//   b            packed weights [tap][8 planes][64 output channels][8], 8 kB a tap
//   sums         32 registers, as 8 tiles of mma: StageTile's epilogues take them as they are
//   weight ring  kSlots chunks of 3 taps, shared by a cluster of kCluster blocks: each block asks for its share of a chunk
//                and the copy engine writes it to all of them, so the second-level cache is read once a cluster
//
// Two phase barriers a slot, in every block. `full`: the bytes of a chunk have come from all blocks; `empty`: every warp
// of every block has multiplied by the chunk, and the slot may be written again. Chunk i uses slot i % kSlots in phase
// i / kSlots of both. A chunk is asked for when the one before its slot's last one is done, so that a block that is a
// chunk ahead of another does not wait for it.
//
// Weights are 74 kB a convolution and block, 1.2 us from the second-level cache at 64 bytes a clock; products are 4.7
// MFLOP, 0.65 us at 1.75 GHz. The cluster takes the first to a quarter.
#pragma once

#include "cuda/hopper.h"
#include "cuda/stage_pack.h"
#include "cuda/stage_tile.h"

namespace wnfused::gpu {

// Packed weights as wgmma reads b.
template <int kChannels_>
struct PlaneWeights {
  using Precision = Bfloat16;
  static constexpr int kChannels = kChannels_;

  WNFUSED_DEVICE static PackedWeight at(int index) {
    const int piece = index / 8;
    return {piece % kChannels, piece / kChannels % kPlanes * 8 + index % 8, piece / (kChannels * kPlanes)};
  }

  WNFUSED_DEVICE static int piece(int i, int group, bool by_input) {
    if (!by_input) return i / 16 * kChannels + group * 16 + i % 16;
    const int plane = group * 2 + i / kChannels % 2;
    return (i / (2 * kChannels) * kPlanes + plane) * kChannels + i % kChannels;
  }

 private:
  static constexpr int kPlanes = kChannels / 8;
};

template <int kSlots_, int kCluster_>
struct WarpgroupConfig : StageConfig<Bfloat16, 64, 8, 8, 1, 4, 1, 3, kSlots_, 2> {
  static constexpr int kCluster = kCluster_;
  static constexpr bool kEmptyBlocks = kCluster > 1;
};

template <class Config, bool kBackward>
struct WarpgroupStageKernel : StageTile<Config, kBackward> {
  using Tile = StageTile<Config, kBackward>;
  using Params = StageParams;
  using Weights = PlaneWeights<Config::kChannels>;
  static constexpr int kClusterBlocks = Config::kCluster;
  static constexpr int kSharedBytes = Config::kSharedBytes + 2 * Config::kSlots * kPhaseBarrierBytes;

  WNFUSED_DEVICE static void run(const Params& params, char* shared) {
    WarpgroupStageKernel kernel(params, shared);
    kernel.create_barriers();
    kernel.clear_operands();
    cluster_barrier();
    for (int index = 0; index < Config::kSlots; ++index) kernel.fetch_chunk(index);
    kernel.load_input();
#pragma unroll 1
    for (int step = 0; step < 2 * params.blocks; ++step) kernel.convolve(step);
    if (params.output.values.data) kernel.store_output();
    cluster_barrier();  // others arrive at this block's barriers until they are done
  }

 private:
  using Tile::operand, Tile::params, Tile::shared, Tile::sums;
  static constexpr int kPlaneBytes = Config::kPlaneBytes, kRowBytes = Config::kPaddedWidth * 16;
  static constexpr int kShareBytes = Config::kChunkBytes / Config::kCluster;
  static_assert(Config::kTiles == 1 && Config::kColumns == 8 && Config::kWarps == 4 && Config::kWidth == 8);
  static_assert(Config::kChunkBytes % (16 * Config::kCluster) == 0);

  int chunk = 0;  // of all convolutions, the one whose products are next

  WNFUSED_DEVICE WarpgroupStageKernel(const Params& params, char* shared) : Tile(params, shared) {}

  // ------------------------------------------------------------------------------------------------- weights

  WNFUSED_DEVICE char* slot_of(int index) const {
    return shared + Config::kBuffers * Config::kOperandBytes + index % Config::kSlots * Config::kChunkBytes;
  }
  WNFUSED_DEVICE char* full(int index) const {
    return shared + Config::kSharedBytes + index % Config::kSlots * kPhaseBarrierBytes;
  }
  WNFUSED_DEVICE char* empty(int index) const { return full(index) + Config::kSlots * kPhaseBarrierBytes; }
  WNFUSED_DEVICE static int phase_of(int index) { return index / Config::kSlots; }

  WNFUSED_DEVICE void create_barriers() const {
    if (thread_index() != 0) return;
    for (int slot = 0; slot < Config::kSlots; ++slot) {
      create_phase_barrier(full(slot), 1);
      create_phase_barrier(empty(slot), Config::kWarps * Config::kCluster);
    }
  }

  // The first warp asks for this block's share of a chunk, on behalf of all blocks.
  WNFUSED_DEVICE void fetch_chunk(int index) const {
    if (thread_index() >= 32 || index >= 2 * params.blocks * Config::kChunks) return;
    if (index >= Config::kSlots) wait_for_phase(empty(index), (phase_of(index) - 1) % 2);
    if (lane_index() != 0) return;
    const int share = cluster_rank() * kShareBytes;
    const char* from = params.weights + static_cast<int64_t>(index) * Config::kChunkBytes;
    arrive_expecting(full(index), Config::kChunkBytes);
    copy_to_blocks(slot_of(index) + share, from + share, kShareBytes, full(index), (1 << Config::kCluster) - 1);
  }

  // This warp has multiplied by chunk `index`: it says so to every block, and asks for what follows.
  WNFUSED_DEVICE void release_chunk(int index) const {
    if (lane_index() < Config::kCluster) arrive_at_block(empty(index), lane_index());
    if (index > 0) fetch_chunk(index - 1 + Config::kSlots);
  }

  // -------------------------------------------------------------------------------------------- convolutions

  WNFUSED_DEVICE void convolve(int step) {
    const int conv = this->conv_of(step);
    const typename Tile::Ending ending = this->load_ending(step);  // ahead of its use
    publish_to_products();
    block_barrier();  // the operand is complete
#pragma unroll 1
    for (int part = 0; part < Config::kChunks; ++part, ++chunk) {
      wait_for_phase(full(chunk), phase_of(chunk) % 2);
      begin_products();
      multiply(part);
      commit_products();
      if (part == 0) {
        if (params.operands) this->keep_operand(conv);
      } else {
        wait_products<1>();
        release_chunk(chunk - 1);
      }
    }
    wait_products<0>();
    release_chunk(chunk - 1);
    this->finish(step, ending);
  }

  // Starts the products of this chunk's taps.
  WNFUSED_DEVICE void multiply(int part) {
    const char *a = shared + operand + Config::tap_shift(part * Config::kChunkTaps) * 16, *b = slot_of(chunk);
#pragma unroll
    for (int tap = 0; tap < Config::kChunkTaps; ++tap)
#pragma unroll
      for (int depth = 0; depth < Config::kChannels / 16; ++depth)
        multiply_warpgroup(
            sums[0],
            matrix_descriptor(a + Config::tap_shift(tap) * 16 + 2 * depth * kPlaneBytes, kPlaneBytes, kRowBytes),
            matrix_descriptor(b + tap * Config::kTapBytes + 2 * depth * Config::kChannels * 16,
                              Config::kChannels * 16, 128));
  }
};

}  // namespace wnfused::gpu

// The residual stage of 32 and 64 channels by wgmma: sm_90a. Pixels are the rows of its products and stay in registers,
// as fragments of mma, which are loaded once for the taps of a column that share them; weights are in shared memory,
// read once for the 64 rows of a warpgroup. So a convolution reads less shared memory than by mma, and its products run
// while their warps load the next ones' pixels and keep the operand.
//
//   a            16 pixels a warp, tile and k-step: one row of a map of 16 x 16, two of a map of 8 x 8
//   b            packed weights [tap][C / 8 planes][C output channels][8] bf16, or [C / 4]..[4] fp32
//   sums         as kTiles x kColumns tiles of mma: StageTile's epilogues take them as they are
//   weight ring  kSlots chunks of kChunkTaps taps, shared by a cluster of kCluster blocks: each block asks for its
//                share of a chunk and the copy engine writes it to all of them, so the second-level cache is read once
//                a cluster
//
// Two phase barriers a slot, in every block. `full`: the bytes of a chunk have come from all blocks; `empty`: every
// warp of every block has multiplied by the chunk, and the slot may be written again. Chunk i uses slot i % kSlots in
// phase i / kSlots of both. A chunk is asked for when the one after its slot's last one is done, so that a block that
// is a chunk ahead of another does not wait for it.
//
// A convolution's products are issued in groups of one column of taps and kGroupDepths k-steps, of which two are under
// way at a time: so many registers of pixels are in use.
#pragma once

#include "cuda/hopper.h"
#include "cuda/stage_pack.h"
#include "cuda/stage_tile.h"

namespace wnfused::gpu {

// Packed weights as wgmma reads b.
template <class Precision_, int kChannels_>
struct PlaneWeights {
  using Precision = Precision_;
  static constexpr int kChannels = kChannels_;

  WNFUSED_DEVICE static PackedWeight at(int index) {
    const int piece = index / kVector;
    return {piece % kChannels, piece / kChannels % kPlanes * kVector + index % kVector, piece / (kChannels * kPlanes)};
  }

  WNFUSED_DEVICE static int piece(int i, int group, bool by_input) {
    constexpr int kGroupPlanes = 16 / kVector;
    if (!by_input) return i / 16 * kChannels + group * 16 + i % 16;
    const int plane = group * kGroupPlanes + i / kChannels % kGroupPlanes;
    return (i / (kGroupPlanes * kChannels) * kPlanes + plane) * kChannels + i % kChannels;
  }

 private:
  static constexpr int kVector = Precision::kVector, kPlanes = kChannels / kVector;
};

template <class Precision, int kChannels, int kSide, int kWarps, int kChunkTaps, int kSlots, int kCluster_>
struct WarpgroupConfig : StageConfig<Precision, kChannels, kSide, kSide, 1, kWarps, 1, kChunkTaps, kSlots, 2> {
  static constexpr int kCluster = kCluster_;
  static constexpr bool kEmptyBlocks = kCluster > 1, kStartsSums = true;
};

template <class Config, bool kBackward>
struct WarpgroupStageKernel : StageTile<Config, kBackward> {
  using Tile = StageTile<Config, kBackward>;
  using Params = StageParams;
  using Precision = typename Config::Precision;
  using Weights = PlaneWeights<Precision, Config::kChannels>;
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
  using Tile::operand, Tile::params, Tile::shared, Tile::sums, Tile::warp;
  static constexpr int kPlaneBytes = Config::kPlaneBytes, kRowBytes = Config::kPaddedWidth * 16;
  static constexpr int kShareBytes = Config::kChunkBytes / Config::kCluster;
  static_assert(Config::kReusesRows && Config::kWarpColumns == 1 && Config::kWarps % 4 == 0);
  static_assert(Config::kWidth == 8 || Config::kWidth == 16);
  static_assert(Config::kChunkBytes % (16 * Config::kCluster) == 0);

  int first_chunk = 0;  // of the convolution whose turn it is, numbered through all of them

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

  static constexpr int kDepths = Config::kChannels / Precision::kDepth;
  static constexpr int kGroupDepths = Config::kWidth == 8 ? 4 : 2;
  static constexpr int kColumnGroups = kDepths / kGroupDepths, kGroups = 3 * kColumnGroups;
  static constexpr int kChunkGroups = Config::kChunkTaps / 3 * kColumnGroups;
  static_assert(kDepths % kGroupDepths == 0);

  WNFUSED_DEVICE void convolve(int step) {
    const int conv = this->conv_of(step);
    const typename Tile::Ending ending = this->load_ending(step);  // ahead of its use
    const char* pixels = shared + operand + lane_index() / 16 * kPlaneBytes + warp.window(0, lane_index() % 16) * 16;
    block_barrier();  // the operand is complete
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int column = group / kColumnGroups, depth = group % kColumnGroups * kGroupDepths;
      const int chunk = first_chunk + group / kChunkGroups;
      multiply(pixels + column * 16 + 2 * depth * kPlaneBytes, group, chunk);
      if (group == 0 && params.operands) this->keep_operand(conv);
      if (group > 0) wait_products<1>();
      if (group > 0 && group % kChunkGroups == 0) release_chunk(chunk - 1);
    }
    wait_products<0>();
    settle(sums);
    first_chunk += Config::kChunks;
    release_chunk(first_chunk - 1);
    this->finish(step, ending);
  }

  // Starts the products of one group.
  WNFUSED_DEVICE void multiply(const char* pixels, int group, int chunk) {
    constexpr int kLoads = Config::kWidth == 8 ? Config::kTiles + 1 : Config::kTiles + 2;
    constexpr int kLoadRows = Config::kWidth == 8 ? 2 : 1;
    uint32_t loaded[kGroupDepths][kLoads][4];
#pragma unroll
    for (int depth = 0; depth < kGroupDepths; ++depth)
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        load_matrices(loaded[depth][i], pixels + 2 * depth * kPlaneBytes + i * kLoadRows * kRowBytes);
    if (group % kChunkGroups == 0) wait_for_phase(full(chunk), phase_of(chunk) % 2);
    const int in_chunk = group % kChunkGroups, tap = in_chunk / kColumnGroups * 3;
    const int first_depth = in_chunk % kColumnGroups * kGroupDepths;
    constexpr int kWeightPlane = Config::kChannels * 16;
    const uint64_t weights =
        matrix_descriptor(slot_of(chunk) + tap * Config::kTapBytes + 2 * first_depth * kWeightPlane, kWeightPlane, 128);
    begin_products();
#pragma unroll
    for (int depth = 0; depth < kGroupDepths; ++depth)
#pragma unroll
      for (int ky = 0; ky < 3; ++ky)
#pragma unroll
        for (int tile = 0; tile < Config::kTiles; ++tile) {
          const uint64_t b = moved(weights, ky * Config::kTapBytes + 2 * depth * kWeightPlane);
          const bool adds = group > 0 || depth > 0 || ky > 0;
          if constexpr (Config::kWidth == 8) {
            const auto &upper = loaded[depth][tile], &lower = loaded[depth][tile + 1];
            if (ky == 1) {
              const uint32_t between[4] = {upper[1], lower[0], upper[3], lower[2]};
              multiply_one(sums[tile], between, b, adds);
            } else {
              multiply_one(sums[tile], ky == 0 ? upper : lower, b, adds);
            }
          } else {
            multiply_one(sums[tile], loaded[depth][tile + ky], b, adds);
          }
        }
    commit_products();
  }

  WNFUSED_DEVICE static void multiply_one(float (&c)[Config::kColumns][4], const uint32_t (&a)[4], uint64_t b,
                                          bool adds) {
    if constexpr (Precision::kIsBfloat16)
      multiply_warpgroup_bf16(c, a, b, adds);
    else
      multiply_warpgroup_tf32(c, a, b, adds);
  }
};

}  // namespace wnfused::gpu

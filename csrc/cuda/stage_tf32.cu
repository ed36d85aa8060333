// The residual stage in fp32 with tf32 products. One operand buffer: two would not fit an sm_89 with 99 KB.
#include "cuda/stage_table.h"

namespace wnfused::gpu {
namespace {

// Images a block, rows x columns of warps, taps a chunk, slots of the ring, operand buffers.
template <int kChannels, int kSide, int kImages, int kRows, int kColumns, int kTaps, int kSlots>
using Stage = StageConfig<Tf32, kChannels, kSide, kSide, kImages, kRows, kColumns, kTaps, kSlots, 1>;

// Images and rows an item, warps that share a tile, stages of the ring.
template <int kChannels, int kSide, int kImages, int kRows, int kSplit, int kStages>
using Gradient = GradientConfig<Tf32, kChannels, kSide, kSide, kImages, kRows, kSplit, kStages>;

}  // namespace

const StageEntry stage_tf32[] = {
    stage_entry<Stage<16, 32, 1, 8, 1, 9, 2>, Gradient<16, 32, 1, 8, 8, 2>>("tf32 16x32x32"),
    stage_entry<Stage<32, 16, 1, 4, 2, 3, 3>, Gradient<32, 16, 1, 8, 2, 2>>("tf32 32x16x16"),
    stage_entry<Stage<64, 8, 1, 2, 4, 1, 4>, Gradient<64, 8, 1, 8, 1, 2>>("tf32 64x8x8"),
    stage_entry<Stage<16, 28, 1, 10, 1, 9, 2>, Gradient<16, 28, 1, 7, 8, 2>>("tf32 16x28x28"),
    stage_entry<Stage<32, 14, 1, 7, 2, 3, 3>, Gradient<32, 14, 1, 7, 2, 2>>("tf32 32x14x14"),
    stage_entry<Stage<64, 7, 1, 2, 4, 1, 4>, Gradient<64, 7, 1, 7, 1, 2>>("tf32 64x7x7"),
    stage_entry<Stage<16, 8, 2, 4, 1, 9, 2>, Gradient<16, 8, 4, 8, 8, 2>>("tf32 16x8x8"),
    stage_entry<Stage<32, 4, 4, 2, 2, 3, 3>, Gradient<32, 4, 4, 4, 2, 2>>("tf32 32x4x4"),
    stage_entry<Stage<64, 2, 4, 1, 4, 1, 4>, Gradient<64, 2, 8, 2, 1, 2>>("tf32 64x2x2"),
    {},
};

}  // namespace wnfused::gpu

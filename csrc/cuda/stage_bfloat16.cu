// The residual stage in bfloat16: the maps of CIFAR (32 x 32), MNIST (28 x 28) and digits (8 x 8) and their halves.
#include "cuda/stage_table.h"

namespace wnfused::gpu {
namespace {

// Images a block, rows x columns of warps, taps a chunk, slots of the ring, operand buffers.
template <int kChannels, int kSide, int kImages, int kRows, int kColumns, int kTaps, int kSlots>
using Stage = StageConfig<Bfloat16, kChannels, kSide, kSide, kImages, kRows, kColumns, kTaps, kSlots, 2>;

// Images and rows an item, warps that share a tile, stages of the ring.
template <int kChannels, int kSide, int kImages, int kRows, int kSplit, int kStages>
using Gradient = GradientConfig<Bfloat16, kChannels, kSide, kSide, kImages, kRows, kSplit, kStages>;

}  // namespace

const StageEntry stage_bfloat16[] = {
    stage_entry<Stage<16, 32, 1, 8, 1, 9, 3>, Gradient<16, 32, 1, 16, 8, 2>>("bfloat16 16x32x32"),
    stage_entry<Stage<32, 16, 1, 4, 2, 9, 2>, Gradient<32, 16, 1, 16, 2, 2>>("bfloat16 32x16x16"),
    stage_entry<Stage<64, 8, 1, 2, 4, 3, 3>, Gradient<64, 8, 2, 8, 1, 2>>("bfloat16 64x8x8"),
    stage_entry<Stage<16, 28, 1, 10, 1, 9, 3>, Gradient<16, 28, 1, 14, 8, 2>>("bfloat16 16x28x28"),
    stage_entry<Stage<32, 14, 1, 7, 2, 9, 2>, Gradient<32, 14, 1, 14, 2, 2>>("bfloat16 32x14x14"),
    stage_entry<Stage<64, 7, 1, 2, 4, 3, 3>, Gradient<64, 7, 1, 7, 1, 3>>("bfloat16 64x7x7"),
    stage_entry<Stage<16, 8, 2, 4, 1, 9, 3>, Gradient<16, 8, 8, 8, 8, 2>>("bfloat16 16x8x8"),
    stage_entry<Stage<32, 4, 4, 2, 2, 9, 2>, Gradient<32, 4, 8, 4, 2, 2>>("bfloat16 32x4x4"),
    stage_entry<Stage<64, 2, 4, 1, 4, 3, 3>, Gradient<64, 2, 8, 2, 1, 3>>("bfloat16 64x2x2"),
    {},
};

}  // namespace wnfused::gpu

// Stages with more shared memory than sm_89 has, for sm_90 and later, which the number in the file's name stands for.
// Chunks of more taps are one barrier a convolution instead of three, or three instead of nine, and let each warp, of
// which there may be fewer, go through more products without a stop.
#include "cuda/stage_table.h"

namespace wnfused::gpu {
namespace {

// Images a block, rows x columns of warps, taps a chunk, slots of the ring, operand buffers.
template <class Precision, int kChannels, int kSide, int kRows, int kColumns, int kTaps, int kSlots>
using Stage = StageConfig<Precision, kChannels, kSide, kSide, 1, kRows, kColumns, kTaps, kSlots, 2>;

// Images and rows an item, warps that share a tile, stages of the ring.
template <class Precision, int kChannels, int kSide, int kImages, int kRows, int kSplit, int kStages>
using Gradient = GradientConfig<Precision, kChannels, kSide, kSide, kImages, kRows, kSplit, kStages>;

constexpr int kLimit = 227 * 1024;

template <class Kernel>
struct Own : Kernel {};

template <class Forward, class Backward, class Gradient>
constexpr StageEntry large_entry(const char* name) {
  return stage_entry<Forward, Backward, Gradient, StageKernel, kLimit, Own>(name);
}

}  // namespace

const StageEntry stage_large_bfloat16[] = {
    large_entry<Stage<Bfloat16, 64, 8, 2, 2, 9, 2>, Stage<Bfloat16, 64, 8, 2, 2, 9, 2>,
                Gradient<Bfloat16, 64, 8, 4, 8, 1, 2>>("bfloat16 64x8x8 large"),
    {},
};

const StageEntry stage_large_tf32[] = {
    large_entry<Stage<Tf32, 32, 16, 4, 2, 9, 2>, Stage<Tf32, 32, 16, 4, 2, 9, 2>, Gradient<Tf32, 32, 16, 1, 8, 2, 2>>(
        "tf32 32x16x16 large"),
    large_entry<Stage<Tf32, 64, 8, 2, 2, 3, 3>, Stage<Tf32, 64, 8, 2, 2, 3, 3>, Gradient<Tf32, 64, 8, 2, 8, 1, 2>>(
        "tf32 64x8x8 large"),
    {},
};

}  // namespace wnfused::gpu

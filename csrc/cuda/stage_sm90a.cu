// The residual stages by wgmma, for sm_90a alone: what the architecture's suffix stands for in a file's name.
#include "cuda/stage_table.h"
#include "cuda/stage_warpgroup.h"

namespace wnfused::gpu {
namespace {

// Warps, taps a chunk, slots of the ring. Clusters of two blocks: of 132 multiprocessors, each of which has one block,
// they fill all, clusters of four 120, which is two rounds for a batch of 128.
template <class Precision, int kChannels, int kSide, int kWarps, int kTaps, int kSlots>
using Stage = WarpgroupConfig<Precision, kChannels, kSide, kWarps, kTaps, kSlots, 2>;

// As in stage_large_from90.cu and in the tables of all architectures.
template <class Precision, int kChannels, int kSide, int kImages, int kRows, int kSplit, int kStages>
using Gradient = GradientConfig<Precision, kChannels, kSide, kSide, kImages, kRows, kSplit, kStages>;

constexpr int kLimit = 227 * 1024;

template <class Kernel>
struct Own : Kernel {};

template <class Stage, class Gradient>
constexpr StageEntry warpgroup_entry(const char* name) {
  return stage_entry<Stage, Stage, Gradient, WarpgroupStageKernel, kLimit, Own>(name);
}

}  // namespace

const StageEntry stage_warpgroup_bfloat16[] = {
    warpgroup_entry<Stage<Bfloat16, 32, 16, 8, 9, 4>, Gradient<Bfloat16, 32, 16, 1, 16, 2, 2>>(
        "bfloat16 32x16x16 sm_90a"),
    warpgroup_entry<Stage<Bfloat16, 64, 8, 4, 3, 8>, Gradient<Bfloat16, 64, 8, 4, 8, 1, 2>>("bfloat16 64x8x8 sm_90a"),
    {},
};

const StageEntry stage_warpgroup_tf32[] = {
    warpgroup_entry<Stage<Tf32, 32, 16, 8, 9, 3>, Gradient<Tf32, 32, 16, 1, 8, 2, 2>>("tf32 32x16x16 sm_90a"),
    warpgroup_entry<Stage<Tf32, 64, 8, 4, 3, 3>, Gradient<Tf32, 64, 8, 2, 8, 1, 2>>("tf32 64x8x8 sm_90a"),
    {},
};

}  // namespace wnfused::gpu

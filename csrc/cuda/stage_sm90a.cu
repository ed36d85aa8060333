// The residual stage by wgmma, for sm_90a alone: what the architecture's suffix stands for in a file's name.
#include "cuda/stage_table.h"
#include "cuda/stage_warpgroup.h"

namespace wnfused::gpu {
namespace {

template <int kSlots, int kCluster>
using Stage = WarpgroupConfig<kSlots, kCluster>;

// As in stage_large_from90.cu.
using Gradient = GradientConfig<Bfloat16, 64, 8, 8, 4, 8, 1, 2>;

constexpr int kLimit = 227 * 1024;

template <class Kernel>
struct Own : Kernel {};

}  // namespace

// Slots of the ring, blocks of threads of a cluster.
const StageEntry stage_sm90a[] = {
    stage_entry<Stage<8, 4>, Stage<8, 4>, Gradient, WarpgroupStageKernel, kLimit, Own>("bfloat16 64x8x8 sm_90a"),
    {},
};

}  // namespace wnfused::gpu

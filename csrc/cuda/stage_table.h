// What a configuration of the residual stage offers, with its kernels behind plain function pointers: the same table
// for the launches on a GPU and for the emulation.
#pragma once

#include "cuda/gradient_kernel.h"
#include "cuda/stage_kernel.h"
#include "cuda/stage_pack.h"

namespace wnfused::gpu {

struct StageEntry {
  const char* name;
  Precision precision;
  int channels, height, width;
  int value_bytes;
  int shared_bytes;        // the most that one of its kernels needs
  int images;              // a block of threads of forward and backward
  int gradient_items;      // pieces of work an image of the weight gradient
  int gradient_images;     // images of one piece
  int gradient_resident;   // its blocks of threads that a multiprocessor has at a time
  int pack_rows, sum_rows;  // rows of weights that a block of threads packs, and whose slices one sums
  Status (*pack)(const PackParams&, int64_t, Queue);
  Status (*forward)(const StageParams&, int64_t, Queue);
  Status (*backward)(const StageParams&, int64_t, Queue);
  Status (*gradient)(const GradientParams&, int64_t, Queue);
  Status (*gradient_sum)(const GradientParams&, int64_t, Queue);
  Status (*clusters)(int* count);  // of forward's blocks of threads that run at once

  int64_t packed_bytes(int64_t convs) const { return convs * 9 * channels * channels * value_bytes; }
};

// What a block may ask for on sm_86 and sm_89, the least of all from sm_80 on.
constexpr int kSharedLimit = 99 * 1024;

template <class Kernel>
using AsItIs = Kernel;

// Forward and backward may be cut differently: a backward needs a few registers more. `Own` makes types of a file's own
// of its kernels, where that is compiled for other architectures than the rest: of a template that two files
// instantiate for the same type the linker keeps one launch, and with it one file's machine code.
template <class Forward, class Backward, class Gradient, template <class, bool> class Kernel = StageKernel,
          int kLimit = kSharedLimit, template <class> class Own = AsItIs>
constexpr StageEntry stage_entry(const char* name) {
  using Precision = typename Forward::Precision;
  static_assert(Forward::kChannels == Backward::kChannels && Forward::kChannels == Gradient::kChannels);
  static_assert(Forward::kHeight == Backward::kHeight && Forward::kHeight == Gradient::kHeight);
  static_assert(Forward::kWidth == Backward::kWidth && Forward::kWidth == Gradient::kWidth);
  static_assert(Forward::kImages == Backward::kImages);
  using Pack = PackKernel<typename Kernel<Forward, false>::Weights>;
  constexpr int kShared[] = {Kernel<Forward, false>::kSharedBytes, Kernel<Backward, true>::kSharedBytes,
                             Gradient::kSharedBytes};
  constexpr int kLarger = kShared[0] > kShared[1] ? kShared[0] : kShared[1];
  static_assert(kLarger <= kLimit && kShared[2] <= kLimit);
  return {name,
          Precision::kPrecision,
          Forward::kChannels,
          Forward::kHeight,
          Forward::kWidth,
          Precision::kBytes,
          kLarger > kShared[2] ? kLarger : kShared[2],
          Forward::kImages,
          Gradient::kBands,
          Gradient::kImages,
          Gradient::kBlocksPerMultiprocessor,
          Pack::kRows,
          GradientSumKernel<Forward::kChannels>::kRows,
          launch<Own<Pack>>,
          launch<Own<Kernel<Forward, false>>>,
          launch<Own<Kernel<Backward, true>>>,
          launch<Own<GradientKernel<Gradient>>>,
          launch<Own<GradientSumKernel<Forward::kChannels>>>,
          active_clusters<Own<Kernel<Forward, false>>>};
}

template <class Stage, class Gradient>
constexpr StageEntry stage_entry(const char* name) {
  return stage_entry<Stage, Stage, Gradient>(name);
}

// A table's end has no name. stage_bfloat16.cu, stage_tf32.cu and stage_float32.cu define one each,
// stage_large_from90.cu what those architectures take first, and stage_sm90a.cu what that one has besides.
extern const StageEntry stage_bfloat16[], stage_tf32[], stage_float32[], stage_large_bfloat16[], stage_large_tf32[],
    stage_warpgroup_bfloat16[], stage_warpgroup_tf32[];

inline const StageEntry* stage_table(Precision precision) {
  const StageEntry* tables[] = {stage_bfloat16, stage_tf32, stage_float32};
  return tables[static_cast<int>(precision)];
}

// Null where a precision has none.
inline const StageEntry* large_stage_table(Precision precision) {
  const StageEntry* tables[] = {stage_large_bfloat16, stage_large_tf32, nullptr};
  return tables[static_cast<int>(precision)];
}

// Likewise.
inline const StageEntry* warpgroup_stage_table(Precision precision) {
  const StageEntry* tables[] = {stage_warpgroup_bfloat16, stage_warpgroup_tf32, nullptr};
  return tables[static_cast<int>(precision)];
}

}  // namespace wnfused::gpu

// Both gradients of a linear layer of few samples in one launch, since neither needs the other (small_linear.h).
#pragma once

#include "cuda/small_linear_input.h"
#include "cuda/small_linear_weight.h"

namespace wnfused::gpu {

// The first blocks are the input gradient's, which take longer, and the others the weight gradient's. A gradient that
// is not asked for has none.
template <class Kind, class T, class N, int kWarps, int kPieces>
struct SmallLinearBackward {
  using Params = SmallLinearParams<T, N>;
  using Input = SmallLinearInputGradient<Kind, T, N, kWarps>;
  using Weight = SmallLinearWeightGradient<Kind, T, N, kWarps, kPieces>;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kSharedBytes =
      Input::kSharedBytes > Weight::kSharedBytes ? Input::kSharedBytes : Weight::kSharedBytes;
  // Two where 128 registers a thread are enough: 1,024 features make more blocks than an H100 has multiprocessors.
  static constexpr bool kIsLean = Weight::kKeepsV && (Kind::kPrecision != Precision::kFloat32 || kPieces == 1);
  static constexpr int kBlocksPerMultiprocessor = kIsLean ? 2 : 1;

  WNFUSED_HOST_DEVICE static int input_blocks(const Params& params) { return params.dx ? Input::blocks(params) : 0; }
  static int64_t blocks(const Params& params) {
    return input_blocks(params) + (params.dv ? Weight::blocks(params) : 0);
  }

  WNFUSED_DEVICE static void run(const Params& params, char* shared) {
    const int inputs = input_blocks(params);
    if (block_index() < inputs)
      Input::run(params, block_index(), shared);
    else
      Weight::run(params, block_index() - inputs, shared);
  }
};

template <class Kind, class T, class N>
Status enqueue_small_linear_backward(const SmallLinearParams<T, N>& params, Queue queue) {
  const auto run = [&](auto kernel) {
    using Kernel = decltype(kernel);
    return launch<Kernel>(params, Kernel::blocks(params), queue);
  };
  if (params.columns <= 256) return run(SmallLinearBackward<Kind, T, N, 8, 1>{});
  if (params.columns <= 1024) return run(SmallLinearBackward<Kind, T, N, 8, 4>{});
  // More warps would leave them too few registers.
  constexpr int kWarps = Kind::kPrecision == Precision::kFloat32 ? 8 : 12, kAllPieces = kMostSmallColumns / 32;
  return run(SmallLinearBackward<Kind, T, N, kWarps, (kAllPieces + kWarps - 1) / kWarps>{});
}

}  // namespace wnfused::gpu

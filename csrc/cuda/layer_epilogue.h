// What follows the vendor's product in one pass over its output, in place: y <- act(y + bias + residual). torch makes a
// pass of each of the three.
//
//   y      dense, in any order in which channels run fastest (inner = 1) or every `inner` entries: entry i is of
//          channel i / inner % channels. The residual lies as y does
//   pass   a thread takes kVector neighbouring entries, 16 bytes where channels and addresses allow it. Floor: y twice,
//          the residual once
//
// Sums are float32, rounded once.
#pragma once

#include "cuda/activation.h"
#include "cuda/target.h"

namespace wnfused::gpu {

template <class N>
struct LayerEpilogueParams {
  N* y;
  const N *bias, *residual;  // null: none
  int64_t count;
  int64_t channels, inner;
  bool activates;
  float slope;  // of what is not positive
};

template <class N, int kVector>
struct LayerEpilogueKernel {
  using Params = LayerEpilogueParams<N>;
  static constexpr int kThreads = 256, kSharedBytes = 0, kBlocksPerMultiprocessor = 4;
  static constexpr int64_t kBlockEntries = int64_t{kThreads} * kVector;

  struct alignas(kVector * sizeof(N)) Vector {
    N value[kVector];
  };

  WNFUSED_DEVICE static void run(const Params& params, char*) {
    const int64_t first = block_index() * kBlockEntries + static_cast<int64_t>(thread_index()) * kVector;
    if (first >= params.count) return;
    Vector y = load_own<Vector>(params.y + first), residual{};
    if (params.residual) residual = load_own<Vector>(params.residual + first);
    // A vector is of as many channels as it has entries, or of one.
    const int64_t channel = params.bias ? channel_of(params, first) : 0;
    const bool neighbours = params.inner == 1;
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      float value = widen(y.value[k]);
      if (params.bias) value += widen(load_global<N>(params.bias + channel + (neighbours ? k : 0)));
      if (params.residual) value += widen(residual.value[k]);
      if (params.activates) value = activated(value, params.slope);
      y.value[k] = narrow<N>(value);
    }
    store_global<Vector>(params.y + first, y);
  }

 private:
  WNFUSED_DEVICE static int64_t channel_of(const Params& params, int64_t entry) {
    // A division of 64 bits takes a hundred instructions.
    if (params.count <= 0x7fffffff) {
      const auto at = static_cast<uint32_t>(entry) / static_cast<uint32_t>(params.inner);
      return at % static_cast<uint32_t>(params.channels);
    }
    return entry / params.inner % params.channels;
  }
};

// Enqueues it, by vectors if whole ones lie within a channel, or within all of them, and at their places.
template <class N>
Status enqueue_layer_epilogue(const LayerEpilogueParams<N>& params, Queue queue) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(N));
  const auto is_aligned = [](const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; };
  const bool whole = params.bias ? (params.inner == 1 ? params.channels : params.inner) % kVector == 0
                                 : params.count % kVector == 0;
  const auto blocks = [&](int64_t entries) { return (params.count + entries - 1) / entries; };
  if (whole && is_aligned(params.y) && is_aligned(params.residual)) {
    using Kernel = LayerEpilogueKernel<N, kVector>;
    return launch<Kernel>(params, blocks(Kernel::kBlockEntries), queue);
  }
  using Kernel = LayerEpilogueKernel<N, 1>;
  return launch<Kernel>(params, blocks(Kernel::kBlockEntries), queue);
}

}  // namespace wnfused::gpu

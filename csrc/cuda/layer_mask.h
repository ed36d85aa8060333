// What precedes the vendor's products of a layer's backward in one pass over its gradient: dz = mask dy, and the sums
// of dz over each channel, the bias's gradient. torch makes a pass of each.
//
//   maps     dense, channels run fastest (inner = 1) or every `inner` entries; dy, y and dz lie alike
//   shares   of the map, each with a block's sums in `partial` [shares, channels]; whoever reads them adds them up
//            in that order (layer_weight.h)
//   pass     a thread takes kVector neighbouring entries. Floor: dy, y and dz once
//
// Sums are float32, each thread's own, then a fixed order: the same bits in every run.
#pragma once

#include "cuda/activation.h"
#include "cuda/target.h"

namespace wnfused::gpu {

template <class N>
struct LayerMaskParams {
  const N *dy, *y;  // y null: no activation
  N* dz;            // null: not wanted
  float* partial;   // null: not wanted
  int64_t count, channels, inner, shares;
  float slope;  // of what is not positive
};

// What both kernels do with a vector of entries.
template <class N, int kVector>
struct LayerMask {
  struct alignas(kVector * sizeof(N)) Vector {
    N value[kVector];
  };
  static constexpr int kThreads = 256;

  template <class Add>
  WNFUSED_DEVICE static void take(const LayerMaskParams<N>& params, int64_t at, const Add& add) {
    const Vector dy = load_own<Vector>(params.dy + at);
    Vector y{}, dz{};
    if (params.y) y = load_own<Vector>(params.y + at);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const float value = widen(dy.value[k]);
      dz.value[k] = narrow<N>(params.y ? masked(value, widen(y.value[k]), params.slope) : value);
      add(k, widen(dz.value[k]));
    }
    if (params.dz) store_global<Vector>(params.dz + at, dz);
  }
};

// inner = 1: a block takes the pixels of a share, and up to 256 vectors of their channels.
template <class N, int kVector>
struct LayerMaskRows : LayerMask<N, kVector> {
  using Params = LayerMaskParams<N>;
  static constexpr int kThreads = LayerMask<N, kVector>::kThreads;
  static constexpr int kSharedBytes = kThreads * kVector * 4, kBlocksPerMultiprocessor = 4;

  static int64_t blocks_of_a_share(const Params& params) {
    return (params.channels / kVector + kThreads - 1) / kThreads;
  }

  WNFUSED_DEVICE static void run(const Params& params, char* shared) {
    const int64_t vectors = params.channels / kVector, groups = (vectors + kThreads - 1) / kThreads;
    const int64_t share = block_index() / groups, first_vector = block_index() % groups * kThreads;
    const int64_t left = vectors - first_vector;
    const int wide = static_cast<int>(left < kThreads ? left : kThreads), lines = kThreads / wide;
    const int line = thread_index() / wide, column = thread_index() % wide;
    float sums[kVector] = {};
    if (line < lines) {
      const int64_t pixels = params.count / params.channels, span = (pixels + params.shares - 1) / params.shares;
      const int64_t last = (share + 1) * span < pixels ? (share + 1) * span : pixels;
#pragma unroll 4
      for (int64_t pixel = share * span + line; pixel < last; pixel += lines)
        LayerMask<N, kVector>::take(params, pixel * params.channels + (first_vector + column) * kVector,
                                    [&](int k, float value) { sums[k] += value; });
    }
    if (!params.partial) return;
#pragma unroll
    for (int k = 0; k < kVector; ++k) store_shared(shared + (k * kThreads + thread_index()) * 4, sums[k]);
    block_barrier();
    for (int i = thread_index(); i < wide * kVector; i += kThreads) {
      float sum = 0.0f;
      for (int from = 0; from < lines; ++from)
        sum += load_shared<float>(shared + (i % kVector * kThreads + from * wide + i / kVector) * 4);
      store_global(params.partial + share * params.channels + first_vector * kVector + i, sum);
    }
  }
};

// inner > 1: a block takes a share of one channel's planes.
template <class N, int kVector>
struct LayerMaskPlanes : LayerMask<N, kVector> {
  using Params = LayerMaskParams<N>;
  static constexpr int kThreads = LayerMask<N, kVector>::kThreads, kWarps = kThreads / 32;
  static constexpr int kSharedBytes = kWarps * 4, kBlocksPerMultiprocessor = 4;

  static int64_t blocks_of_a_share(const Params& params) { return params.channels; }

  WNFUSED_DEVICE static void run(const Params& params, char* shared) {
    const int64_t share = block_index() / params.channels, channel = block_index() % params.channels;
    const int64_t of_a_plane = params.inner / kVector, vectors = params.count / params.channels / kVector;
    const int64_t span = (vectors + params.shares - 1) / params.shares;
    const int64_t last = (share + 1) * span < vectors ? (share + 1) * span : vectors;
    const bool is_narrow = params.count <= 0x7fffffff;  // a division of 64 bits takes a hundred instructions
    float sum = 0.0f;
#pragma unroll 4
    for (int64_t i = share * span + thread_index(); i < last; i += kThreads) {
      const int64_t image = is_narrow ? static_cast<uint32_t>(i) / static_cast<uint32_t>(of_a_plane) : i / of_a_plane;
      const int64_t plane = image * params.channels + channel;
      LayerMask<N, kVector>::take(params, plane * params.inner + (i - image * of_a_plane) * kVector,
                                  [&](int, float value) { sum += value; });
    }
    if (!params.partial) return;
    sum = warp_sum(sum);
    if (lane_index() == 0) store_shared(shared + thread_index() / 32 * 4, sum);
    block_barrier();
    if (thread_index() >= 32) return;
    sum = warp_sum(lane_index() < kWarps ? load_shared<float>(shared + lane_index() * 4) : 0.0f);
    if (lane_index() == 0) store_global(params.partial + share * params.channels + channel, sum);
  }
};

// Entries of a share, at least, for a block; and blocks, at most: four for each of an H200's 132 multiprocessors.
// Constants, so that the bits do not depend on the device.
constexpr int64_t kMaskEntries = 8192, kMaskBlocks = 528;

// Calls body with the kernel that takes them: by vectors if whole ones lie within a channel, or within all of them, and
// at their places.
template <class N, class Body>
auto with_layer_mask(const LayerMaskParams<N>& params, const Body& body) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(N));
  const auto is_aligned = [](const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; };
  const bool whole = (params.inner == 1 ? params.channels : params.inner) % kVector == 0 && is_aligned(params.dy) &&
                     is_aligned(params.y) && is_aligned(params.dz);
  if (params.inner == 1) return whole ? body(LayerMaskRows<N, kVector>{}) : body(LayerMaskRows<N, 1>{});
  return whole ? body(LayerMaskPlanes<N, kVector>{}) : body(LayerMaskPlanes<N, 1>{});
}

// How many shares the map has.
template <class N>
int64_t layer_mask_shares(const LayerMaskParams<N>& params) {
  return with_layer_mask(params, [&](auto kernel) -> int64_t {
    const int64_t blocks = decltype(kernel)::blocks_of_a_share(params);
    const int64_t wanted = params.count / (blocks * kMaskEntries), most = kMaskBlocks / blocks;
    const int64_t possible = wanted < most ? wanted : most;
    return possible < 1 ? 1 : possible;
  });
}

template <class N>
Status enqueue_layer_mask(const LayerMaskParams<N>& params, Queue queue) {
  return with_layer_mask(params, [&](auto kernel) -> Status {
    using Kernel = decltype(kernel);
    return launch<Kernel>(params, Kernel::blocks_of_a_share(params) * params.shares, queue);
  });
}

}  // namespace wnfused::gpu

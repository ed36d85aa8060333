// A layer's weight for the vendor's product, and its gradient: what stands beside the product in one launch each way.
//
//   forward    w = g v / ||v||, rounded to the product's type and in the order in which the product wants it; the
//              norms; the bias in the product's type
//   backward   dg = <dw, v> / ||v||,   dv = (g / ||v||) (dw - v dg / ||v||), from dw as the product left it; the bias's
//              gradient, from the sums of shares that layer_mask.h leaves
//
// A row is one filter's entries, [channels][taps] in one tensor and [taps][channels] (channels_last) in the other, or
// the same in both. Entry q of a row of w, or dw, is entry place(q) of the row of v: with m entries that run fastest in
// w, place(q) = q % m * (length / m) + q / m, and m = length where the order is the same. One block of threads takes a
// row; it reads v twice, the second time from cache. Floor: v once, w once; dw and v once, dv once.
#pragma once

#include "cuda/target.h"

namespace wnfused::gpu {

// T: of v, g, dv and dg; N: of w, dw and the bias that the product takes.
template <class T, class N>
struct LayerWeightParams {
  const T *v, *g;
  const N* dw;        // backward only
  const float* bias;  // forward: null, or to be rounded
  N *w, *bias_out;
  T *dv, *dg;
  const float* partial;  // backward: null, or [shares, rows], whose sums over shares are dbias
  T* dbias;
  int64_t shares;
  float* norm;  // written forward, unless null; read backward
  int64_t rows;
  int length, fastest;
};

template <class T, class N, int kThreads_, bool kBackward>
struct LayerWeightKernel {
  using Params = LayerWeightParams<T, N>;
  static constexpr int kThreads = kThreads_, kWarps = kThreads / 32;
  static constexpr int kSharedBytes = 128, kBlocksPerMultiprocessor = 1;
  static_assert(kWarps * 4 <= kSharedBytes);

  WNFUSED_DEVICE static void run(const Params& params, char* shared) {
    const int64_t row = block_index(), first = row * params.length;
    const bool turned = params.fastest != params.length;
    const int slowest = params.length / params.fastest;
    const auto place = [&](int q) { return turned ? q % params.fastest * slowest + q / params.fastest : q; };
    // Neighbouring threads take neighbouring entries of w or dw, which the product's side has just left in memory or
    // waits for; those of v lie in a cache from the first pass on.
    float sum = 0.0f;
#pragma unroll 4
    for (int q = thread_index(); q < params.length; q += kThreads) {
      if constexpr (kBackward) {
        sum += widen(load_global<T>(params.v + first + place(q))) * widen(load_global<N>(params.dw + first + q));
      } else {
        const float v = widen(load_global<T>(params.v + first + q));
        sum += v * v;
      }
    }
    sum = block_sum(sum, shared);
    const float gain = widen(load_global<T>(params.g + row));
    if constexpr (kBackward) {
      const float norm = load_global<float>(params.norm + row);
      const bool zero = norm == 0.0f;
      const float inverse = zero ? 0.0f : 1.0f / norm, gain_gradient = zero ? 0.0f : sum * inverse;
      const float scale = gain * inverse, unit = gain_gradient * inverse;
#pragma unroll 4
      for (int q = thread_index(); q < params.length; q += kThreads) {
        const int64_t at = first + place(q);
        const float across = widen(load_global<N>(params.dw + first + q)) - unit * widen(load_global<T>(params.v + at));
        store_global<T>(params.dv + at, narrow<T>(zero ? 0.0f : scale * across));
      }
      if (thread_index() == 0) store_global<T>(params.dg + row, narrow<T>(gain_gradient));
      if (params.partial && thread_index() < 32) {
        float bias = 0.0f;
        for (int64_t share = lane_index(); share < params.shares; share += 32)
          bias += load_global<float>(params.partial + share * params.rows + row);
        bias = warp_sum(bias);
        if (lane_index() == 0) store_global<T>(params.dbias + row, narrow<T>(bias));
      }
    } else {
      const float norm = square_root(sum);
      // A zero row has zero weights, also where the gain is infinite.
      const float scale = norm == 0.0f ? 0.0f : gain / norm;
#pragma unroll 4
      for (int q = thread_index(); q < params.length; q += kThreads) {
        const float v = widen(load_global<T>(params.v + first + place(q)));
        store_global<N>(params.w + first + q, narrow<N>(norm == 0.0f ? 0.0f : scale * v));
      }
      if (thread_index() == 0) {
        if (params.norm) store_global<float>(params.norm + row, norm);
        if (params.bias) store_global<N>(params.bias_out + row, narrow<N>(load_global<float>(params.bias + row)));
      }
    }
  }

 private:
  // The same in every thread.
  WNFUSED_DEVICE static float block_sum(float value, char* shared) {
    value = warp_sum(value);
    if constexpr (kWarps > 1) {
      const int warp = thread_index() / 32, lane = lane_index();
      if (lane == 0) store_shared(shared + warp * 4, value);
      block_barrier();
      value = warp_sum(lane < kWarps ? load_shared<float>(shared + lane * 4) : 0.0f);
    }
    return value;
  }
};

// Enqueues it: a row of up to 256 entries is a warp's.
template <bool kBackward, class T, class N>
Status enqueue_layer_weight(const LayerWeightParams<T, N>& params, Queue queue) {
  if (params.length <= 256) return launch<LayerWeightKernel<T, N, 32, kBackward>>(params, params.rows, queue);
  return launch<LayerWeightKernel<T, N, 256, kBackward>>(params, params.rows, queue);
}

}  // namespace wnfused::gpu

// Row norm, forward and backward: one block of threads takes one row.
//
//   data   v [outer, rows, inner]: row r is the set of all v[o, r, i]. Rows along dim 0 have outer = 1, so each row is one
//          run of memory; one norm over a whole tensor has rows = outer = 1.
//   pass   forward reads v twice (the second time from cache) and writes w; backward reads v and dw twice and writes dv.
//          Floor: 2 resp. 3 tensors of memory traffic.
//   sums   each thread its own, then a tree: the same bits in every run. float32 for narrow types, float64 for float64.
#pragma once

#include "cuda/target.h"

namespace wnfused::gpu {

template <class T>
struct RowNormParams {
  using Wide = decltype(widen(T{}));
  const T *v, *g, *dw;  // dw: backward only
  T *w, *dg;            // w: or dv, backward
  Wide* norm;           // written forward, read backward
  int64_t outer, rows, inner;
};

template <class T, int kThreads_, bool kBackward>
struct RowNormKernel {
  using Params = RowNormParams<T>;
  using Wide = typename Params::Wide;
  static constexpr int kThreads = kThreads_, kWarps = kThreads / 32;
  static constexpr int kSharedBytes = 256, kBlocksPerMultiprocessor = 1;
  static_assert(kWarps * 8 <= kSharedBytes);

  WNFUSED_DEVICE static void run(const Params& params, char* shared) {
    const int64_t row = block_index();
    Wide sum = 0;
    for_each(params, row, [&](int64_t at) {
      const Wide v = widen(load_global<T>(params.v + at));
      sum += v * (kBackward ? widen(load_global<T>(params.dw + at)) : v);
    });
    sum = block_sum(sum, shared);
    const Wide gain = widen(load_global<T>(params.g + row));
    if constexpr (kBackward)
      backward(params, row, sum, gain);
    else
      forward(params, row, square_root(sum), gain);
  }

 private:
  template <class Body>
  WNFUSED_DEVICE static void for_each(const Params& params, int64_t row, const Body& body) {
    if (params.outer == 1) {
      for (int64_t i = thread_index(); i < params.inner; i += kThreads) body(row * params.inner + i);
      return;
    }
    for (int64_t i = thread_index(); i < params.outer * params.inner; i += kThreads)
      body((i / params.inner * params.rows + row) * params.inner + i % params.inner);
  }

  WNFUSED_DEVICE static Wide block_sum(Wide value, char* shared) {
    value = warp_sum(value);
    if constexpr (kWarps > 1) {
      const int warp = thread_index() / 32, lane = lane_index();
      if (lane == 0) store_shared(shared + warp * 8, value);
      block_barrier();
      value = warp_sum(lane < kWarps ? load_shared<Wide>(shared + lane * 8) : Wide(0));
    }
    return value;
  }

  WNFUSED_DEVICE static void forward(const Params& params, int64_t row, Wide norm, Wide gain) {
    // A zero row has zero weights, also where the gain is infinite.
    const Wide scale = norm == 0 ? Wide(0) : gain / norm;
    for_each(params, row, [&](int64_t at) {
      const Wide v = widen(load_global<T>(params.v + at));
      store_global<T>(params.w + at, narrow<T>(norm == 0 ? Wide(0) : scale * v));
    });
    if (thread_index() == 0) store_global<Wide>(params.norm + row, norm);
  }

  WNFUSED_DEVICE static void backward(const Params& params, int64_t row, Wide along, Wide gain) {
    const Wide norm = load_global<Wide>(params.norm + row);
    const bool zero = norm == 0;
    const Wide inverse = zero ? Wide(0) : 1 / norm, gain_gradient = zero ? Wide(0) : along * inverse;
    const Wide scale = gain * inverse, unit = gain_gradient * inverse;
    for_each(params, row, [&](int64_t at) {
      const Wide across = widen(load_global<T>(params.dw + at)) - unit * widen(load_global<T>(params.v + at));
      store_global<T>(params.w + at, narrow<T>(zero ? Wide(0) : scale * across));
    });
    if (thread_index() == 0) store_global<T>(params.dg + row, narrow<T>(gain_gradient));
  }
};

// Rows of up to this many values are a warp's.
constexpr int64_t kShortRow = 1024;

template <class T, bool kBackward>
Status enqueue_row_norm(const RowNormParams<T>& params, Queue queue) {
  return params.outer * params.inner <= kShortRow
             ? launch<RowNormKernel<T, 32, kBackward>>(params, params.rows, queue)
             : launch<RowNormKernel<T, 256, kBackward>>(params, params.rows, queue);
}

}  // namespace wnfused::gpu

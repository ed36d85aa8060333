// Row norm, forward and backward: one block of threads takes one row, or a share of one where rows are few and long.
//
//   data   v [outer, rows, inner]: row r is the set of all v[o, r, i]. Rows along dim 0 have outer = 1, so each row is
//          one run of memory; one norm over a whole tensor has rows = outer = 1.
//   pass   forward reads v twice (the second time from cache) and writes w; backward reads v and dw twice and writes
//          dv. Floor: 2 resp. 3 tensors of memory traffic.
//   sums   each thread its own, then a tree: the same bits in every run. float32 for narrow types, float64 for float64.
//   share  of a row, `shares` of which go to as many blocks: one launch leaves each block's sum in `partial`, the next
//          adds them up, every block for itself and in the same order, and writes its share.
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
  Wide* partial;   // [rows, shares], null where a row is not shared
  int64_t shares;  // of a row

  WNFUSED_HOST_DEVICE int64_t length() const { return outer * inner; }
};

// What a launch does: all of it, the sums of shares, or all that follows them.
enum class RowNormStep { kWhole, kSums, kRest };

template <class T, int kThreads_, bool kBackward, RowNormStep kStep = RowNormStep::kWhole>
struct RowNormKernel {
  using Params = RowNormParams<T>;
  using Wide = typename Params::Wide;
  static constexpr int kThreads = kThreads_, kWarps = kThreads / 32;
  static constexpr int kSharedBytes = 256, kBlocksPerMultiprocessor = 1;
  static_assert(kWarps * 8 <= kSharedBytes);

  WNFUSED_DEVICE static void run(const Params& params, char* shared) {
    const int64_t row = kStep == RowNormStep::kWhole ? block_index() : block_index() / params.shares;
    const int64_t number = kStep == RowNormStep::kWhole ? 0 : block_index() % params.shares;
    const Share share = share_of(params, number);
    const Wide mine = kStep == RowNormStep::kRest ? sum_of_shares(params, row) : sum_of(params, row, share);
    const Wide sum = block_sum(mine, shared);
    if constexpr (kStep == RowNormStep::kSums) {
      if (thread_index() == 0) store_global<Wide>(params.partial + block_index(), sum);
    } else {
      const Wide gain = widen(load_global<T>(params.g + row));
      if constexpr (kBackward)
        backward(params, row, share, number == 0, sum, gain);
      else
        forward(params, row, share, number == 0, square_root(sum), gain);
    }
  }

 private:
  struct Share {
    int64_t first, last;  // entries of the row
  };

  WNFUSED_DEVICE static Share share_of(const Params& params, int64_t number) {
    if (kStep == RowNormStep::kWhole) return {0, params.length()};
    const int64_t size = (params.length() + params.shares - 1) / params.shares, first = number * size;
    return {first, first + size < params.length() ? first + size : params.length()};
  }

  template <class Body>
  WNFUSED_DEVICE static void for_each(const Params& params, int64_t row, const Share& share, const Body& body) {
    if (params.outer == 1) {
      for (int64_t i = share.first + thread_index(); i < share.last; i += kThreads) body(row * params.inner + i);
      return;
    }
    for (int64_t i = share.first + thread_index(); i < share.last; i += kThreads)
      body((i / params.inner * params.rows + row) * params.inner + i % params.inner);
  }

  // This thread's part of them.
  WNFUSED_DEVICE static Wide sum_of(const Params& params, int64_t row, const Share& share) {
    Wide sum = 0;
    for_each(params, row, share, [&](int64_t at) {
      const Wide v = widen(load_global<T>(params.v + at));
      sum += v * (kBackward ? widen(load_global<T>(params.dw + at)) : v);
    });
    return sum;
  }
  WNFUSED_DEVICE static Wide sum_of_shares(const Params& params, int64_t row) {
    Wide sum = 0;
    for (int64_t i = thread_index(); i < params.shares; i += kThreads)
      sum += load_global<Wide>(params.partial + row * params.shares + i);
    return sum;
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

  // `once`: whether this block writes what there is one of a row.
  WNFUSED_DEVICE static void forward(const Params& params, int64_t row, const Share& share, bool once, Wide norm,
                                     Wide gain) {
    // A zero row has zero weights, also where the gain is infinite.
    const Wide scale = norm == 0 ? Wide(0) : gain / norm;
    for_each(params, row, share, [&](int64_t at) {
      const Wide v = widen(load_global<T>(params.v + at));
      store_global<T>(params.w + at, narrow<T>(norm == 0 ? Wide(0) : scale * v));
    });
    if (once && thread_index() == 0) store_global<Wide>(params.norm + row, norm);
  }

  WNFUSED_DEVICE static void backward(const Params& params, int64_t row, const Share& share, bool once, Wide along,
                                      Wide gain) {
    const Wide norm = load_global<Wide>(params.norm + row);
    const bool zero = norm == 0;
    const Wide inverse = zero ? Wide(0) : 1 / norm, gain_gradient = zero ? Wide(0) : along * inverse;
    const Wide scale = gain * inverse, unit = gain_gradient * inverse;
    for_each(params, row, share, [&](int64_t at) {
      const Wide across = widen(load_global<T>(params.dw + at)) - unit * widen(load_global<T>(params.v + at));
      store_global<T>(params.w + at, narrow<T>(zero ? Wide(0) : scale * across));
    });
    if (once && thread_index() == 0) store_global<T>(params.dg + row, narrow<T>(gain_gradient));
  }
};

// Rows of up to this many values are a warp's.
constexpr int64_t kShortRow = 1024;
// A share has at least so many values, 64 a thread: less does not pay for a second launch. Two blocks for each of an
// H200's 132 multiprocessors are enough; a constant, so that the bits do not depend on the device.
constexpr int64_t kShareValues = 1 << 14, kSharingBlocks = 264;

// How many blocks of threads share a row: 1 where a launch has enough of them anyway.
inline int64_t row_shares(int64_t rows, int64_t length) {
  if (rows == 0 || length < 2 * kShareValues) return 1;
  const int64_t wanted = (kSharingBlocks + rows - 1) / rows, possible = length / kShareValues;
  return wanted < possible ? wanted : possible;
}

template <class T, bool kBackward>
Status enqueue_row_norm(const RowNormParams<T>& params, Queue queue) {
  if (params.length() <= kShortRow) return launch<RowNormKernel<T, 32, kBackward>>(params, params.rows, queue);
  if (params.shares == 1) return launch<RowNormKernel<T, 256, kBackward>>(params, params.rows, queue);
  const int64_t blocks = params.rows * params.shares;
  const Status status = launch<RowNormKernel<T, 256, kBackward, RowNormStep::kSums>>(params, blocks, queue);
  if (status != Status{}) return status;
  return launch<RowNormKernel<T, 256, kBackward, RowNormStep::kRest>>(params, blocks, queue);
}

}  // namespace wnfused::gpu

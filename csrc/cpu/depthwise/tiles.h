// Register tiles of depthwise layers: rows of pixels times taps, and rows of pixels summed with them.
#pragma once

#include <utility>

#include "cpu/conv/epilogue.h"
#include "cpu/depthwise/regions.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Accumulators of a tile, beside the operands.
constexpr int kDepthwisePixels = kParts == 1 ? 16 : kParts == 2 ? 5 : 2;
constexpr int kDepthwiseTaps = kParts == 1 ? 9 : kParts == 2 ? 5 : 2;

// One tap of a grid: where its weights, or their sums, lie in a bank of one block, and where it meets the source from a
// unit's own place, in floats.
struct Term {
  int64_t plane, source;
};

// What becomes of a row's sums.
struct RowEnd {
  Block start;  // the bias
  const float* added;
  int64_t added_step;
  float* target;
  int64_t target_step;
  int64_t next;  // from a row of the target to the next one that is written, where no cache has that; else 0
  Activation activation;
  float slope;
};

// A row's products, and what is read for them. step: floats of the source from one pixel to the next.
struct RowProducts {
  const Term* terms;
  int64_t count;
  const float *source, *bank;
  int64_t step;
};

// Pixels [first, first + Count) of a row. Step: pixels of the source from one to the next, 0 for any number.
template <int Count, int Step>
inline void depthwise_tile(const RowProducts& row, int64_t first, const RowEnd& end) {
  const int64_t step = Step ? Step * kLanes : row.step;
  const float *source = row.source + first * step, *bank = row.bank;
  float* target = end.target + first * end.target_step;
  if (end.next) {
    WNFUSED_UNROLL for (int t = 0; t < Count; ++t) prefetch_for_writing(target + t * end.target_step + end.next);
  }
  Block sum[Count];
  WNFUSED_UNROLL for (int t = 0; t < Count; ++t) sum[t] = end.start;
  for (const Term *term = row.terms, *last = term + row.count; term < last; ++term) {
    const Block weight = load(bank + term->plane);
    const float* at = source + term->source;
    WNFUSED_UNROLL for (int t = 0; t < Count; ++t) sum[t] = multiply_add(load(at + t * step), weight, sum[t]);
  }
  if (end.added) {
    const float* added = end.added + first * end.added_step;
    WNFUSED_UNROLL for (int t = 0; t < Count; ++t) sum[t] = load(added + t * end.added_step) + sum[t];
  }
  if (end.activation == Activation::kRelu) {
    WNFUSED_UNROLL for (int t = 0; t < Count; ++t) sum[t] = relu(sum[t]);
  } else if (end.activation == Activation::kLeakyRelu) {
    // This is right for an infinity, too.
    WNFUSED_UNROLL for (int t = 0; t < Count; ++t) sum[t] = leaky_mask(sum[t], sum[t], splat(end.slope));
  }
  WNFUSED_UNROLL for (int t = 0; t < Count; ++t) store(target + t * end.target_step, sum[t]);
}

template <int Step, int... Counts>
WNFUSED_INLINE auto depthwise_tile_of(int64_t count, std::integer_sequence<int, Counts...>) {
  using Tile = void (*)(const RowProducts&, int64_t, const RowEnd&);
  static constexpr Tile tiles[] = {depthwise_tile<Counts + 1, Step>...};
  return tiles[count - 1];
}

inline void depthwise_row(const RowProducts& row, int64_t pixels, const RowEnd& end) {
  constexpr std::make_integer_sequence<int, kDepthwisePixels> counts;
  for (int64_t first = 0; first < pixels;) {
    // Tiles of one length, rather than full ones and a rest that is too short to fill the processor's pipes.
    const int64_t count = divide_up(pixels - first, divide_up(pixels - first, kDepthwisePixels));
    const auto tile = row.step == kLanes       ? depthwise_tile_of<1>(count, counts)
                      : row.step == 2 * kLanes ? depthwise_tile_of<2>(count, counts)
                                               : depthwise_tile_of<0>(count, counts);
    tile(row, first, end);
    first += count;
  }
}

// sums[tap] += source * gradient over a row of pixels, for `Count` taps; kBias: and the last of the sums += gradient.
template <int Count, bool kBias>
inline void depthwise_sum_tile(const RowProducts& row, const Term* terms, const float* gradient, int64_t pixels,
                               float* sums, float* bias) {
  Block sum[Count + 1];
  const float* source[Count + 1];
  WNFUSED_UNROLL for (int k = 0; k < Count; ++k) {
    sum[k] = load(sums + terms[k].plane);
    source[k] = row.source + terms[k].source;
  }
  if (kBias) sum[Count] = load(bias);
  for (int64_t t = 0, at = 0; t < pixels; ++t, at += row.step) {
    const Block value = load(gradient + t * kLanes);
    WNFUSED_UNROLL for (int k = 0; k < Count; ++k) sum[k] = multiply_add(load(source[k] + at), value, sum[k]);
    if (kBias) sum[Count] = sum[Count] + value;
  }
  WNFUSED_UNROLL for (int k = 0; k < Count; ++k) store(sums + terms[k].plane, sum[k]);
  if (kBias) store(bias, sum[Count]);
}

template <bool kBias, int... Counts>
WNFUSED_INLINE auto depthwise_sum_tile_of(int64_t count, std::integer_sequence<int, Counts...>) {
  using Tile = void (*)(const RowProducts&, const Term*, const float*, int64_t, float*, float*);
  static constexpr Tile tiles[] = {depthwise_sum_tile<Counts, kBias>...};
  return tiles[count];
}

inline void depthwise_sums(const RowProducts& row, const float* gradient, int64_t pixels, float* sums, float* bias) {
  constexpr std::make_integer_sequence<int, kDepthwiseTaps + 1> counts;
  const int64_t first = smaller(kDepthwiseTaps, row.count);
  depthwise_sum_tile_of<true>(first, counts)(row, row.terms, gradient, pixels, sums, bias);
  for (int64_t k = first; k < row.count;) {
    const int64_t count = smaller(kDepthwiseTaps, row.count - k);
    depthwise_sum_tile_of<false>(count, counts)(row, row.terms + k, gradient, pixels, sums, bias);
    k += count;
  }
}

}  // namespace wnfused::cpu::WNFUSED_ISA

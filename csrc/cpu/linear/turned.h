// A linear layer of floats by rows of v that are turned in registers, 16 at a time, so that a lane is a feature:
//
//      x[m][k] ->                         sum[m] += turned[k] x[m][k]       one load of turned, M scalars of x
//                                         square += turned[k]^2             M multiply-adds, and one while v is turned
//      turned  k |----|----|  features
//                                         y[m] = act(sum[m] gain / sqrt(square) + bias)
//
// Turned rows stay in L1 or L2 while all rows of x pass by, read where they lie. No sum goes across a vector, nothing is
// packed but v, and the epilogue finds y in registers.
#pragma once

#include "cpu/linear/small.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Rows of x at once, and the least number of sums, so that none waits for the one before it.
constexpr int kTurnedRows = kParts == 1 ? 8 : 4, kTurnedSums = 8 / kParts;

// Up to 16 rows of v, and the squares of their norms; lanes from count on are 0.
WNFUSED_INLINE Block turn(const float* v, int64_t inner, int64_t count, float* turned) {
  Block squares[4] = {zero(), zero(), zero(), zero()};
  for_blocks(inner, [&](int64_t k, auto move) __attribute__((always_inline)) {
    Block rows[kLanes];
    if (count == kLanes) {
      WNFUSED_UNROLL for (int r = 0; r < kLanes; ++r) rows[r] = move.load(v + r * inner + k);
    } else {
      for (int r = 0; r < kLanes; ++r) rows[r] = r < count ? move.load(v + r * inner + k) : zero();
    }
    transpose(rows);  // columns past the last one are 0
    WNFUSED_UNROLL for (int c = 0; c < kLanes; ++c) {
      store(turned + (k + c) * kLanes, rows[c]);
      squares[c % 4] = multiply_add(rows[c], rows[c], squares[c % 4]);
    }
  });
  return (squares[0] + squares[1]) + (squares[2] + squares[3]);
}

// The scales of features from `first` on. Whether they can wait.
template <class Move>
WNFUSED_INLINE bool turned_scales(const SmallLinear& task, int64_t first, const Move& move, Block norms, Block* scales) {
  float norm[kLanes], scale[kLanes];
  store(norm, norms);
  store(scale, move.load(task.gain + first));
  bool fits = true;
  for (int i = 0; i < kLanes; ++i) scale[i] *= inverse_or_zero(norm[i]);
  for (int i = 0; i < kLanes; ++i) fits &= can_wait(scale[i]);
  *scales = load(scale);
  return fits;
}

WNFUSED_INLINE Block square_roots(const Block& squares) {
  float root[kLanes];
  store(root, squares);
  for (int i = 0; i < kLanes; ++i) root[i] = __builtin_sqrtf(root[i]);
  return load(root);
}

// y of up to 16 features, for kTile rows of x from m on.
template <int kTile, class Move>
WNFUSED_INLINE bool turned_features(const SmallLinear& task, int64_t first, int64_t m, const Move& move,
                                    const Block& scale, const float* turned) {
  constexpr int kChains = kTurnedSums > kTile ? kTurnedSums / kTile : 1;
  const int64_t inner = task.inner;
  const float* x = static_cast<const float*>(task.x.data) + m * inner;
  Block sums[kChains][kTile];
  WNFUSED_UNROLL for (int c = 0; c < kChains; ++c)
    WNFUSED_UNROLL for (int t = 0; t < kTile; ++t) sums[c][t] = zero();
  const auto add = [&](int c, int64_t k) __attribute__((always_inline)) {
    const Block column = load(turned + k * kLanes);
    WNFUSED_UNROLL for (int t = 0; t < kTile; ++t)
      sums[c][t] = multiply_add(splat(x[t * inner + k]), column, sums[c][t]);
  };
  int64_t k = 0;
  for (; k + kChains <= inner; k += kChains)
    WNFUSED_UNROLL for (int c = 0; c < kChains; ++c) add(c, k + c);
  for (; k < inner; ++k) add(0, k);
  WNFUSED_UNROLL for (int width = kChains / 2; width > 0; width /= 2)
    WNFUSED_UNROLL for (int c = 0; c < width; ++c)
      WNFUSED_UNROLL for (int t = 0; t < kTile; ++t) sums[c][t] = sums[c][t] + sums[c + width][t];
  return finish_features<kTile, float>(task, first, m, move, scale, sums[0]);
}

// False if the range did not suffice.
inline bool turned_linear(const SmallLinear& task, const TurnedShare& share) {
  bool in_range = true;
  for (int64_t first = share.feature_begin; first < share.feature_end; first += kLanes) {
    const int64_t count = smaller(kLanes, share.feature_end - first);
    const float* v = static_cast<const float*>(task.v.data) + first * task.inner;
    const Block norms = square_roots(turn(v, task.inner, count, share.turned));
    const auto run = [&](const auto& move) __attribute__((always_inline)) {
      Block scales;
      in_range &= turned_scales(task, first, move, norms, &scales);
      if (share.row_begin == 0) move.store(task.norm + first, norms);
      const auto tile = [&](auto rows, int64_t m) __attribute__((always_inline)) {
        in_range &= turned_features<rows.value>(task, first, m, move, scales, share.turned);
      };
      int64_t m = share.row_begin;
      for (; m + kTurnedRows <= share.row_end; m += kTurnedRows) tile(std::integral_constant<int, kTurnedRows>{}, m);
      if (kTurnedRows > 4 && m + 4 <= share.row_end) tile(std::integral_constant<int, 4>{}, m), m += 4;
      if (m + 2 <= share.row_end) tile(std::integral_constant<int, 2>{}, m), m += 2;
      if (m < share.row_end) tile(std::integral_constant<int, 1>{}, m);
    };
    if (count == kLanes) run(Whole{});
    else run(Partial{count});
  }
  return in_range;
}

}  // namespace wnfused::cpu::WNFUSED_ISA

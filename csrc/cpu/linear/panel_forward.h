// The forward of a linear layer of floats, by panels (panel.h) of 16 rows of v that are turned in registers, so that a
// lane is a feature. Nothing else is packed, and the epilogue finds y in registers:
//
//      y[m] = act(sum[m] gain / sqrt(square) + bias),  square += panel[k]^2 while rows are turned
//
// On AVX2 the depth is cut into pieces whose panels stay in L1 and whose part of x stays in L2 while all of v passes by; y
// holds the sums of the pieces before.
#pragma once

#include "cpu/linear/panel.h"
#include "cpu/linear/small.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Entries of a row at a time.
constexpr int64_t kPanelPiece = kParts == 1 ? int64_t{1} << 32 : 256;

// `length` entries of up to 16 rows of v, `inner` floats apart, and the sums of their squares; lanes from count on are 0.
WNFUSED_INLINE Block turn(const float* v, int64_t inner, int64_t length, int64_t count, float* turned) {
  Block squares[4] = {zero(), zero(), zero(), zero()};
  for_blocks(length, [&](int64_t k, auto move) __attribute__((always_inline)) {
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
WNFUSED_INLINE bool panel_scales(const SmallLinear& task, int64_t first, const Move& move, Block norms, Block* scales) {
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

// False if the range did not suffice.
inline bool panel_forward(const SmallLinear& task, const PanelShare& share) {
  bool in_range = true;
  for (int64_t at = 0; at < task.inner; at += kPanelPiece) {
    const int64_t length = smaller(kPanelPiece, task.inner - at);
    const bool is_first = at == 0, is_last = at + length == task.inner;
    for (int64_t first = share.feature_begin; first < share.feature_end; first += kLanes) {
      const int64_t count = smaller(kLanes, share.feature_end - first);
      const float* v = static_cast<const float*>(task.v.data) + first * task.inner + at;
      Block squares = turn(v, task.inner, length, count, share.panel);
      float* kept_squares = share.squares + (first - share.feature_begin);
      if (!is_first) squares = squares + load(kept_squares);
      if (!is_last) store(kept_squares, squares);
      const auto run = [&](const auto& move) __attribute__((always_inline)) {
        const Block norms = square_roots(squares);
        Block scales;
        if (is_last) in_range &= panel_scales(task, first, move, norms, &scales);
        if (is_last && share.row_begin == 0) move.store(task.norm + first, norms);
        for_tiles(share.row_begin, share.row_end, [&](auto rows, int64_t m) __attribute__((always_inline)) {
          const float* x = static_cast<const float*>(task.x.data) + m * task.inner + at;
          float* y = static_cast<float*>(task.y.data) + m * task.features + first;
          Block sums[rows.value];
          // The first to read x fetches the next rows, which no prefetcher does across the ends of eight short ones.
          const int64_t ahead = first == share.feature_begin ? kPanelRows * task.inner : 0;
          panel_sums(x, task.inner, length, share.panel, sums, ahead);
          WNFUSED_UNROLL for (int r = 0; r < rows.value; ++r) {
            if (!is_first) sums[r] = sums[r] + move.load(y + r * task.features);
            if (!is_last) move.store(y + r * task.features, sums[r]);
          }
          if (is_last) in_range &= finish_features<rows.value, float>(task, first, m, move, scales, sums);
        });
      };
      if (count == kLanes) run(Whole{});
      else run(Partial{count});
    }
  }
  return in_range;
}

}  // namespace wnfused::cpu::WNFUSED_ISA

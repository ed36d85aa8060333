// The forward of a linear layer of floats, by panels (panel.h) of 16 rows of v that are turned in registers, so that a
// lane is a feature. Nothing else is packed, and the epilogue finds y in registers:
//
//      y[m] = act(sum[m] gain / sqrt(square) + bias),  square += panel[k]^2 while rows are turned
#pragma once

#include "cpu/linear/panel.h"
#include "cpu/linear/small.h"

namespace wnfused::cpu::WNFUSED_ISA {

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

// What sums of features from `first` on are to be scaled by: g / ||v||, or 1 where one of those cannot wait and the
// panel, of `entries` floats, is scaled instead.
template <class Move>
WNFUSED_INLINE Block panel_scales(const SmallLinear& task, int64_t first, const Move& move, const Block& norms,
                                  float* panel, int64_t entries) {
  const Block scales = ratio(move.load(task.gain + first), norms);
  float scale[kLanes];
  store(scale, scales);
  bool wait = true;
  for (int i = 0; i < kLanes; ++i) wait &= can_wait(scale[i]);
  if (wait) return scales;
  for (int64_t at = 0; at < entries; at += kLanes) store(panel + at, scales * load(panel + at));
  return splat(1.0f);
}

// Features of kColumns blocks from `first` on, all but the last of them whole. False if the range did not suffice.
template <int kColumns>
WNFUSED_INLINE bool panel_features(const SmallLinear& task, const PanelShare& share, int64_t first) {
  const int64_t step = round_up(task.inner, kLanes) * kLanes, last = first + (kColumns - 1) * kLanes;
  const int64_t count = smaller(kLanes, share.feature_end - last);
  Block norms[kColumns], scales[kColumns];
  WNFUSED_UNROLL for (int c = 0; c < kColumns; ++c)
    norms[c] = square_root(turn(static_cast<const float*>(task.v.data) + (first + c * kLanes) * task.inner, task.inner,
                                 c < kColumns - 1 ? kLanes : count, share.panel + c * step));
  bool in_range = true;
  const auto run = [&](const auto& move) __attribute__((always_inline)) {
    const auto scale = [&](int c, const auto& move) __attribute__((always_inline)) {
      scales[c] = panel_scales(task, first + c * kLanes, move, norms[c], share.panel + c * step, step);
      if (share.row_begin == 0) move.store(task.norm + first + c * kLanes, norms[c]);
    };
    WNFUSED_UNROLL for (int c = 0; c < kColumns - 1; ++c) scale(c, Whole{});
    scale(kColumns - 1, move);
    for_tiles(share.row_begin, share.row_end, [&](auto rows, int64_t m) __attribute__((always_inline)) {
      const float* x = static_cast<const float*>(task.x.data) + m * task.inner;
      Block sums[kColumns][rows.value];
      // The first to read x fetches the next rows, which no prefetcher does across the ends of eight short ones.
      const int64_t ahead = first == share.feature_begin ? kPanelRows * task.inner : 0;
      panel_sums(x, task.inner, task.inner, share.panel, step, sums, ahead);
      const auto finish = [&](int c, const auto& move) __attribute__((always_inline)) {
        in_range &= finish_features<rows.value, float>(task, first + c * kLanes, m, move, scales[c], sums[c]);
      };
      WNFUSED_UNROLL for (int c = 0; c < kColumns - 1; ++c) finish(c, Whole{});
      finish(kColumns - 1, move);
    });
  };
  if (count == kLanes) run(Whole{});
  else run(Partial{count});
  return in_range;
}

inline bool panel_forward(const SmallLinear& task, const PanelShare& share) {
  constexpr int64_t kStep = kPanels * kLanes;
  bool in_range = true;
  int64_t first = share.feature_begin;
  for (; first + (kPanels - 1) * kLanes < share.feature_end; first += kStep)
    in_range &= panel_features<kPanels>(task, share, first);
  for (; first < share.feature_end; first += kLanes) in_range &= panel_features<1>(task, share, first);
  return in_range;
}

}  // namespace wnfused::cpu::WNFUSED_ISA

// Rows of a matrix, read where they lie, times panels: each 16 columns of another, side by side.
//
//      rows[m][k] ->                      sum[c][m] += panel[c][k] rows[m][k]      C loads of panels, M scalars of rows
//                                                                                  C M multiply-adds
//      panel  k |----|----|  16 lanes
//
// Panels stay in L1 or L2 while the rows pass by, and no sum goes across a vector. What makes a panel, and what becomes
// of the sums, is the caller's: panel_forward.h, panel_backward.h.
#pragma once

#include <type_traits>

#include "cpu/vec/runs.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Rows at once, and the least number of sums of a panel, so that none waits for the one before it. A Block of AVX2 is
// two registers, of which there are 16: 12 sums. With two panels AVX-512 adds to 16 sums for 10 loads; with one a
// processor of two multiply-adds and two loads a cycle would wait for loads, 9 for 8 sums.
constexpr int kPanelRows = kParts == 1 ? 8 : 6, kPanelSums = 8 / kParts, kPanels = kParts == 1 ? 2 : 1;

// stride: from one row to the next. step: from one panel to the next. ahead: from a row to one that is to be fetched, 0
// for none. The order of a sum depends on kTile and the depth alone.
template <int kColumns, int kTile>
WNFUSED_INLINE void panel_sums(const float* rows, int64_t stride, int64_t depth, const float* panel, int64_t step,
                               Block (&result)[kColumns][kTile], int64_t ahead = 0) {
  constexpr int kChains = kPanelSums > kTile ? kPanelSums / kTile : 1;
  Block sums[kChains][kColumns][kTile];
  WNFUSED_UNROLL for (int i = 0; i < kChains; ++i)
    WNFUSED_UNROLL for (int c = 0; c < kColumns; ++c)
      WNFUSED_UNROLL for (int t = 0; t < kTile; ++t) sums[i][c][t] = zero();
  // By pointers that step: an index into each would take as many instructions as it takes multiply-adds on AVX2.
  const float *row = rows, *column = panel;
  const auto add = [&](int i) __attribute__((always_inline)) {
    Block entries[kColumns];
    WNFUSED_UNROLL for (int c = 0; c < kColumns; ++c) entries[c] = load(column + c * step);
    WNFUSED_UNROLL for (int t = 0; t < kTile; ++t) {
      const Block entry = splat(row[t * stride]);
      WNFUSED_UNROLL for (int c = 0; c < kColumns; ++c) sums[i][c][t] = multiply_add(entry, entries[c], sums[i][c][t]);
    }
    ++row;
    column += kLanes;
  };
  int64_t k = 0;
  for (; ahead && k + kLanes <= depth; k += kLanes) {
    WNFUSED_UNROLL for (int t = 0; t < kTile; ++t) __builtin_prefetch(row + t * stride + ahead, 0, 3);
    for (int i = 0; i < kLanes; i += kChains)
      WNFUSED_UNROLL for (int c = 0; c < kChains; ++c) add(c);
  }
  for (; k + kChains <= depth; k += kChains)
    WNFUSED_UNROLL for (int c = 0; c < kChains; ++c) add(c);
  for (; k < depth; ++k) add(0);
  WNFUSED_UNROLL for (int width = kChains / 2; width > 0; width /= 2)
    WNFUSED_UNROLL for (int i = 0; i < width; ++i)
      WNFUSED_UNROLL for (int c = 0; c < kColumns; ++c)
        WNFUSED_UNROLL for (int t = 0; t < kTile; ++t) sums[i][c][t] = sums[i][c][t] + sums[i + width][c][t];
  WNFUSED_UNROLL for (int c = 0; c < kColumns; ++c)
    WNFUSED_UNROLL for (int t = 0; t < kTile; ++t) result[c][t] = sums[0][c][t];
}

// tile(rows, m) for rows m, m + 1, ... of [begin, end), as many as fit: in the same tiles wherever it begins at a
// multiple of kPanelRows.
template <class Tile>
WNFUSED_INLINE void for_tiles(int64_t begin, int64_t end, const Tile& tile) {
  int64_t m = begin;
  for (; m + kPanelRows <= end; m += kPanelRows) tile(std::integral_constant<int, kPanelRows>{}, m);
  if (kPanelRows > 4 && m + 4 <= end) tile(std::integral_constant<int, 4>{}, m), m += 4;
  if (m + 2 <= end) tile(std::integral_constant<int, 2>{}, m), m += 2;
  if (m < end) tile(std::integral_constant<int, 1>{}, m);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

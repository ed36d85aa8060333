// The backward of a linear layer of floats, by panels (panel.h):
//
//      dx[m] = sum_n dz[m][n] (s_n v[n])         panels of columns of s v, past the rows of dz
//      dw[n] = sum_m dz[m][n] x[m]               panels of columns of x, past the rows of dz^T, which is made first
//      dv[n] = s_n (dw[n] - v[n] <dw[n], v[n]> / ||v[n]||^2)      where dw lies, in the memory of dv
#pragma once

#include "cpu/layer/rows.h"
#include "cpu/linear/linear_layer.h"
#include "cpu/linear/panel.h"

namespace wnfused::cpu::WNFUSED_ISA {

constexpr int64_t kPanelDepth = PanelBackward::kDepth;

// What loads and stores 16 columns of a matrix of `width` from `column` on, or the last of them.
template <class Run>
WNFUSED_INLINE void at_columns(int64_t column, int64_t width, const Run& run) {
  if (column + kLanes <= width) run(Whole{});
  else run(Partial{width - column});
}

// Rows [begin, end) of `out`, and its columns in blocks [first, last) of 16, from rows of `stride` floats as long as
// depth, by panels of make(k, column, move). Several are made at once, of neighbours: a line of one at a time would be
// all that is fetched of a page.
template <class Make>
WNFUSED_INLINE void panel_product(const float* rows, int64_t stride, int64_t depth, int64_t begin, int64_t end,
                                  float* out, int64_t width, int64_t first, int64_t last, float* panels,
                                  const Make& make) {
  constexpr int64_t kGroup = PanelBackward::kGroup;
  for (int64_t at = 0; at < depth; at += kPanelDepth) {
    const int64_t count = smaller(kPanelDepth, depth - at);
    for (int64_t group = first; group < last; group += kGroup) {
      const int64_t group_end = smaller(last, group + kGroup);
      for (int64_t k = 0; k < count; ++k)
        for (int64_t b = group; b < group_end; ++b)
          at_columns(b * kLanes, width, [&](const auto& move) __attribute__((always_inline)) {
            store(panels + ((b - group) * count + k) * kLanes, make(at + k, b * kLanes, move));
          });
      // The blocks of columns from b on, all but the last of them whole.
      const auto multiply = [&](auto columns, int64_t b) __attribute__((always_inline)) {
        constexpr int kColumns = columns.value;
        const float* panel = panels + (b - group) * count * kLanes;
        at_columns((b + kColumns - 1) * kLanes, width, [&](const auto& move) __attribute__((always_inline)) {
          const auto finish = [&](auto tile, int64_t m) __attribute__((always_inline)) {
            Block sums[kColumns][tile.value];
            panel_sums(rows + m * stride + at, stride, count, panel, count * kLanes, sums);
            WNFUSED_UNROLL for (int t = 0; t < tile.value; ++t) {
              const auto put = [&](int c, const auto& move) __attribute__((always_inline)) {
                float* target = out + (m + t) * width + (b + c) * kLanes;
                move.store(target, at == 0 ? sums[c][t] : sums[c][t] + move.load(target));
              };
              WNFUSED_UNROLL for (int c = 0; c < kColumns - 1; ++c) put(c, Whole{});
              put(kColumns - 1, move);
            }
          };
          // Parts begin at multiples of 16 rows: so do tiles, that sums are the same in any number of parts.
          for (int64_t m = begin; m < end; m += kLanes) for_tiles(m, smaller(m + kLanes, end), finish);
        });
      };
      int64_t b = group;
      for (; b + kPanels <= group_end; b += kPanels) multiply(std::integral_constant<int, kPanels>{}, b);
      for (; b < group_end; ++b) multiply(std::integral_constant<int, 1>{}, b);
    }
  }
}

// Rows [first, first + 16) of dz^T.
WNFUSED_INLINE void turn_gradient(const PanelBackward& job, int64_t first) {
  const int64_t count = smaller(kLanes, job.features - first);
  const auto run = [&](const auto& move) __attribute__((always_inline)) {
    for (int64_t m = 0; m < job.rows; m += kLanes) {
      const int64_t rows = smaller(kLanes, job.rows - m);
      Block square[kLanes];
      for (int r = 0; r < kLanes; ++r)
        square[r] = r < rows ? move.load(job.dz + (m + r) * job.features + first) : zero();
      transpose(square);
      for (int64_t n = 0; n < count; ++n) store(job.turned + (first + n) * job.turned_stride + m, square[n]);
    }
  };
  if (count == kLanes) run(Whole{});
  else run(Partial{count});
}

inline void panel_backward(const PanelBackward& job, Worker& worker) {
  float* panels = job.panels + worker.index() * job.panel_floats;
  const auto input_item = [&](int64_t item) {
    const int64_t part = item / job.input_blocks.parts, blocks = item % job.input_blocks.parts;
    const int64_t begin = job.input_rows.first(part), end = begin + job.input_rows.size(part, job.rows);
    panel_product(job.dz, job.features, job.features, begin, end, job.dx, job.inner, job.input_blocks.begin(blocks),
                  job.input_blocks.begin(blocks + 1), panels,
                  [&](int64_t n, int64_t column, const auto& move) __attribute__((always_inline)) {
                    return move.load(job.v + n * job.inner + column) * splat(job.scale[n]);
                  });
  };
  const auto finish = [&](int64_t n) {
    float* row = job.dv + n * job.inner;
    job.dgain[n] = gradient_row(row, job.v + n * job.inner, row, job.inner, job.gain[n], job.norm[n]);
  };
  const bool in_one = job.weight_blocks.parts == 1;
  const auto weight_item = [&](int64_t item) {
    const int64_t part = item / job.weight_blocks.parts, blocks = item % job.weight_blocks.parts;
    const int64_t begin = job.weight_rows.first(part), end = begin + job.weight_rows.size(part, job.features);
    panel_product(job.turned, job.turned_stride, job.rows, begin, end, job.dv, job.inner,
                  job.weight_blocks.begin(blocks), job.weight_blocks.begin(blocks + 1), panels,
                  [&](int64_t m, int64_t column, const auto& move) __attribute__((always_inline)) {
                    return move.load(job.x + m * job.inner + column);
                  });
    for (int64_t n = begin; in_one && n < end; ++n) finish(n);
  };
  const int64_t turns = job.dv ? divide_up(job.features, kLanes) : 0;
  const int64_t inputs = job.dx ? job.input_rows.parts * job.input_blocks.parts : 0;
  worker.phase({turns, inputs}, [&](int64_t item) {
    if (item < turns) turn_gradient(job, item * kLanes);
    else input_item(item - turns);
  });
  if (!job.dv) return;
  worker.phase({job.weight_rows.parts * job.weight_blocks.parts}, weight_item);
  if (!in_one) worker.phase({job.features}, finish);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

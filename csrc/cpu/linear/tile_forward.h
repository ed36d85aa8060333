// The forward of a linear layer on tiles. Tiles multiply so fast that v is the cost: an item reads its rows from memory
// once, takes the norms while it packs them, and the scale waits for the epilogue. Where its range would not do
// (layer.h) the whole call is taken again, its rows scaled as they are packed; of floats in pieces by vectors.
#pragma once

#include "cpu/linear/driver.h"
#include "cpu/linear/split_range.h"
#include "cpu/products/gemm_tiles.h"

namespace wnfused::cpu::WNFUSED_ISA {

// The units of a chunk of row `r`, and their squares onto `squares`.
template <class Units, class V>
WNFUSED_INLINE void pack_part(const Runs<V>& v, int64_t r, int64_t first, int64_t units, float* target,
                              float* squares) {
  constexpr int64_t kChains = 4, kStep = kChains * kLanes;
  const int64_t begin = 2 * first, whole = smaller(2 * units, v.length - begin) / kStep * kStep / 2;
  const auto put = [&](int64_t unit, const auto& packed) __attribute__((always_inline)) {
    WNFUSED_UNROLL for (int p = 0; p < Units::kUnit.pieces; ++p)
      store(target + p * kNarrowRows * Units::kUnit.chunk + unit, packed.piece[p]);
  };
  const V* part = v.place(r, begin);
  Block sum[kChains] = {load(squares), zero(), zero(), zero()};
  int64_t unit = 0;
  for (; unit < whole; unit += kStep / 2, part += kStep) {
    Block block[kChains];
    WNFUSED_UNROLL for (int c = 0; c < kChains; ++c) {
      block[c] = load(part + c * kLanes);
      sum[c] = multiply_add(block[c], block[c], sum[c]);
    }
    WNFUSED_UNROLL for (int c = 0; c < kChains; c += 2)
      put(unit + c / 2 * kLanes, Units::of_run(part + c * kLanes, block[c], block[c + 1]));
  }
  for (; unit < units; unit += kLanes) {
    const Block one = v.entries(r, begin + 2 * unit), two = v.entries(r, begin + 2 * unit + kLanes);
    sum[0] = multiply_add(two, two, multiply_add(one, one, sum[0]));
    put(unit, Units::along(v, r, first + unit));
  }
  store(squares, (sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// Whether the largest entry of a row of v of that length is in range, by its norm.
WNFUSED_INLINE bool in_split_range(float norm, int64_t count) {
  constexpr float kMost = int64_t{1} << kSplitExponent, kLeast = 1 / kMost;
  return norm == 0 || (norm >= kLeast * __builtin_sqrtf(static_cast<float>(count)) && norm <= kMost);
}

// An item: `count` rows of v from `first` on, and of x those packed at `wide`, from lane0 on.
template <class Units, class X, class V>
inline void output_item_on_tiles(const LinearForward& job, const WideShape& shape, int64_t first, int64_t count,
                                 int64_t lane0, int64_t lanes, const float* wide, float* scratch) {
  // Products of so few rows of x take less time than v does.
  constexpr int64_t kUnits = Units::kUnit.chunk, kFewLanes = 128;
  constexpr bool kSplit = Units::kUnit.pieces > 1;
  const int64_t rows = round_up(count, Units::kRows);
  float *narrow = scratch, *squares = narrow + kNarrowFloats<Units>, *out = squares + rows * kLanes;
  Runs<V> v = runs_of<V>({const_cast<V*>(static_cast<const V*>(job.v.data)) + first * job.inner, job.v.bfloat16}, count,
                         job.inner);
  UpcomingOperands upcoming{};
  const auto product = [&](const auto& pack) {
    for (int64_t chunk = 0; chunk < shape.chunks; ++chunk) {
      // The next chunk of x: all of them may be more than the second level of cache holds.
      const int64_t next = chunk + 1 < shape.chunks ? chunk + 1 : 0, bytes = blocks_of(lanes) * shape.block_floats * 4;
      upcoming.wide = {reinterpret_cast<const char*>(wide + shape.at(next, 0)), bytes};
      for (int64_t r = 0; r < rows; r += kNarrowRows) {
        const int64_t here = smaller(kNarrowRows, rows - r), units = shape.chunk_units(chunk);
        // The rows of v that are packed next.
        const bool last = r + here == rows;
        const int64_t next_row = last ? 0 : r + here, next_chunk = last ? next : chunk;
        upcoming.narrow = {reinterpret_cast<const char*>(v.place(next_row, 2 * next_chunk * kUnits)),
                           static_cast<int64_t>(2 * kUnits * sizeof(V)), static_cast<int64_t>(v.length * sizeof(V)),
                           smaller(kNarrowRows, count - next_row)};
        pack(r, here, chunk * kUnits, units);
        Units::multiply(narrow, here, wide + shape.at(chunk, 0), shape.block_floats, blocks_of(lanes), units,
                        out + r * kLanes, kLanes, rows * kLanes, chunk > 0, &upcoming);
      }
    }
  };
  const auto finish = [&](const float* scale) {
    return finish_outputs<X>(job, first, count, lane0, lanes, {out, kLanes, rows * kLanes}, scale);
  };

  float scale[kTileItemRows] = {};
  if constexpr (!kSplit) {
    if (job.scales_first) {
      for (int64_t r = 0; r < count; ++r) scale[r] = row_scale(job.gain[first + r], job.norm[first + r]);
      v.scale = scale;
      product([&](int64_t row0, int64_t here, int64_t unit0, int64_t units) {
        pack_narrow_along<Units>(v, row0, here, unit0, units, narrow);
      });
      finish(nullptr);
      return;
    }
  }
  for (int64_t r = 0; r < rows; ++r) store(squares + r * kLanes, zero());
  product([&](int64_t row0, int64_t here, int64_t unit0, int64_t units) {
    const int64_t present = smaller(here, count - row0);
    for (int64_t r = 0; r < present; ++r) {
      pack_part<Units>(v, row0 + r, unit0, units, narrow + r * kUnits, squares + (row0 + r) * kLanes);
      if (lanes < kFewLanes) upcoming.narrow.step();
    }
    pack_narrow_along<Units>(v, count, here - present, unit0, units, narrow + present * kUnits);
  });
  bool waits = true;
  for (int64_t r = 0; r < count; ++r) {
    const float norm = __builtin_sqrtf(sum_of(load(squares + r * kLanes)));
    if (lane0 == 0) job.norm[first + r] = norm;
    scale[r] = row_scale(job.gain[first + r], norm);
    waits = waits && can_wait(scale[r]) && (!kSplit || in_split_range(norm, job.inner));
  }
  if (!waits || !finish(scale)) job.out_of_range->store(true, std::memory_order_relaxed);
}

template <class Units, class X>
inline void linear_forward_on_tiles(const LinearForward& job, Worker& worker) {
  Pairs::begin();
  share_outputs<Units, X>(job, worker, [&](const WideShape& shape, int64_t first, int64_t count, int64_t lane0,
                                           int64_t lanes, const float* wide, float* scratch) {
    with_entries(job.v, [&](auto* v) {
      using V = std::remove_pointer_t<decltype(v)>;
      output_item_on_tiles<Units, X, V>(job, shape, first, count, lane0, lanes, wide, scratch);
    });
  });
  Pairs::end();
}

}  // namespace wnfused::cpu::WNFUSED_ISA

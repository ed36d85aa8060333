// Products of two matrices in float32, or in pairs of bfloat16, whose operands are packed on the way:
//
//   out[row][lane] = sum over the depth of narrow[row][d] wide[d][lane]
//
//   wide    [block][depth][16 lanes]   up to kWideBlocks blocks stay in the second level of cache
//   narrow  [row][chunk of the depth]  the rows of a tile stay in the first; one pointer addresses them all
//
//        broadcast d of row r     x     vector d of the block    ->   accumulator [r][block]
//
// A unit of the depth is one float, or two bfloat16 side by side. Packing scales, converts and pads: rows and lanes
// that there are not, and the odd half of a last pair, are zeros.
//
// Floor: rows x lanes x depth multiply-adds, with AVX-512 8 x 3 Blocks of them to 11 loads.
#pragma once

#include "cpu/products/pairs.h"
#include "cpu/products/register_tiles.h"
#include "cpu/products/wide.h"
#include "cpu/vec/prefetch.h"
#include "cpu/vec/runs.h"

namespace wnfused::cpu::WNFUSED_ISA {

WNFUSED_INLINE Block part_of(const Block& block, int64_t count) {
  float entries[kLanes];
  store(entries, block);
  return load(entries, count);
}

// A matrix in the caller's memory, as runs; what is packed of run r is its entries times scale[r].
template <class T>
struct Runs {
  const T* data;
  int64_t count, length;
  const float* scale;  // may be null

  // Whether entries [at, at + size) of a run are all there.
  WNFUSED_INLINE bool has(int64_t run, int64_t at, int64_t size) const { return run < count && at + size <= length; }
  WNFUSED_INLINE const T* place(int64_t run, int64_t at) const { return data + run * length + at; }

  // Entries [at, at + 16) of a run; 0 where there are none.
  WNFUSED_INLINE Block entries(int64_t run, int64_t at) const {
    if (run >= count || at >= length) return zero();
    const T* source = place(run, at);
    if (at + kLanes <= length) return scale ? load(source) * splat(scale[run]) : load(source);
    const Block part = load(source, length - at);
    return scale ? part_of(part * splat(scale[run]), length - at) : part;  // a scale that is not finite leaves no zeros
  }
};

// A vector of units, or one of each of the pieces that they are the sums of.
template <int64_t kPieces>
struct Packed {
  Block piece[kPieces];
};

// A unit is a float.
struct SingleRuns {
  // 16 units along the depth, of a run that lies along it.
  template <class T>
  WNFUSED_INLINE static Packed<1> along(const Runs<T>& runs, int64_t run, int64_t unit) {
    return {{runs.entries(run, unit)}};
  }

  // One unit at 16 places, of runs that lie across the depth.
  template <class T>
  WNFUSED_INLINE static Packed<1> across(const Runs<T>& runs, int64_t unit, int64_t at) {
    return {{runs.entries(unit, at)}};
  }
};

// A unit is two bfloat16. Those that need no scale are taken as they lie.
struct PairRuns {
  // 32 neighbours, which `entries` points to, in two Blocks.
  template <class T>
  WNFUSED_INLINE static Packed<1> of_run(const T* entries, const Block& first, const Block& second) {
    if constexpr (std::is_same_v<T, uint16_t>) return {{load_bits(entries)}};
    else return {{rounded_run(first, second)}};
  }

  template <class T>
  WNFUSED_INLINE static Packed<1> along(const Runs<T>& runs, int64_t run, int64_t unit) {
    if constexpr (std::is_same_v<T, uint16_t>)
      if (!runs.scale && runs.has(run, 2 * unit, 2 * kLanes)) return {{load_bits(runs.place(run, 2 * unit))}};
    return {{rounded_run(runs.entries(run, 2 * unit), runs.entries(run, 2 * unit + kLanes))}};
  }

  template <class T>
  WNFUSED_INLINE static Packed<1> across(const Runs<T>& runs, int64_t unit, int64_t at) {
    if constexpr (std::is_same_v<T, uint16_t>)
      if (!runs.scale && runs.has(2 * unit + 1, at, kLanes))
        return {{load_pairs(runs.place(2 * unit, at), runs.place(2 * unit + 1, at))}};
    return {{rounded_pairs(runs.entries(2 * unit, at), runs.entries(2 * unit + 1, at))}};
  }
};

// Units of a chunk, all pieces counted, and the floats of a packed narrow operand.
template <class Units>
constexpr int64_t kPackedUnits = Units::kUnit.pieces * Units::kUnit.chunk;
template <class Units>
constexpr int64_t kNarrowFloats = kNarrowRows * kPackedUnits<Units>;

// The packed operands. `units` of a chunk of the depth from `first` on; what a row of the narrow one has beyond them up
// to a whole Block is defined, and not used. The pieces of a narrow one lie kNarrowRows rows apart, those of a wide one
// piece_floats (wide.h).

template <class Units, class T>
inline void pack_narrow_along(const Runs<T>& runs, int64_t row0, int64_t rows, int64_t first, int64_t units,
                             float* target) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t u = 0; u < units; u += kLanes) {
      const auto packed = Units::along(runs, row0 + r, first + u);
      WNFUSED_UNROLL for (int p = 0; p < Units::kUnit.pieces; ++p)
        store(target + (p * kNarrowRows + r) * Units::kUnit.chunk + u, packed.piece[p]);
    }
}

template <class Units, class T>
inline void pack_narrow_across(const Runs<T>& runs, int64_t row0, int64_t rows, int64_t first, int64_t units,
                              float* target) {
  for (int64_t r = 0; r < rows; r += kLanes)
    for (int64_t u = 0; u < units; u += kLanes) {
      Block block[Units::kUnit.pieces][kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        const auto packed = Units::across(runs, first + u + i, row0 + r);
        WNFUSED_UNROLL for (int p = 0; p < Units::kUnit.pieces; ++p) block[p][i] = packed.piece[p];
      }
      for (int p = 0; p < Units::kUnit.pieces; ++p) {
        transpose(block[p]);
        WNFUSED_UNROLL for (int64_t i = 0; i < kLanes; ++i)
          store(target + (p * kNarrowRows + r + i) * Units::kUnit.chunk + u, block[p][i]);
      }
    }
}

template <class Units, class T>
inline void pack_wide_along(const Runs<T>& runs, int64_t lane0, int64_t first, int64_t units, int64_t piece_floats,
                            float* target) {
  for (int64_t u = 0; u < units; u += kLanes) {
    Block block[Units::kUnit.pieces][kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      const auto packed = Units::along(runs, lane0 + i, first + u);
      WNFUSED_UNROLL for (int p = 0; p < Units::kUnit.pieces; ++p) block[p][i] = packed.piece[p];
    }
    const int64_t end = smaller(kLanes, units - u);
    for (int p = 0; p < Units::kUnit.pieces; ++p) {
      transpose(block[p]);
      for (int64_t i = 0; i < end; ++i) store(target + p * piece_floats + (u + i) * kLanes, block[p][i]);
    }
  }
}

template <class Units, class T>
inline void pack_wide_across(const Runs<T>& runs, int64_t lane0, int64_t first, int64_t units, int64_t piece_floats,
                             float* target) {
  for (int64_t u = 0; u < units; ++u) {
    const auto packed = Units::across(runs, first + u, lane0);
    WNFUSED_UNROLL for (int p = 0; p < Units::kUnit.pieces; ++p)
      store(target + p * piece_floats + u * kLanes, packed.piece[p]);
  }
}

// What becomes of a tile's sums: they are stored. `row` counts from the product's first.
struct StoreSums {
  WNFUSED_INLINE void operator()(const Block& sum, float* target, int64_t) const { store(target, sum); }
};

// Every chunk of the depth is summed from zero and added as a whole: a sum of many chunks rounds as often as one of
// them has units and the depth has chunks, not as often as both multiplied.
template <class Units, int Rows, int Cols, class End>
inline void product_tile(const float* narrow, const float* wide, int64_t wide_stride, int64_t units, float* out,
                         int64_t out_stride, int64_t out_col_stride, bool accumulate, int64_t row, const End& end) {
  Block sum[Rows][Cols];
  WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) {
    WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) {
      sum[r][c] = zero();
      prefetch_for_writing(out + r * out_stride + c * out_col_stride);
    }
  }
  _Pragma("GCC unroll 4") for (int64_t u = 0; u < units; ++u, ++narrow, wide += kLanes) {
    Block lanes[Cols];
    WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) lanes[c] = load(wide + c * wide_stride);
    WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) {
      const Block value = splat(narrow[r * Units::kUnit.chunk]);
      WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) sum[r][c] = Units::multiply_add(value, lanes[c], sum[r][c]);
    }
  }
  WNFUSED_UNROLL for (int r = 0; r < Rows; ++r) {
    WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) {
      float* target = out + r * out_stride + c * out_col_stride;
      end(accumulate ? load(target) + sum[r][c] : sum[r][c], target, row + r);
    }
  }
}

// What is done between two tiles: nothing.
struct NoStep {
  WNFUSED_INLINE void operator()() const {}
};

// What the units of vectors multiply with.
template <class Units>
struct VectorProducts {
  static constexpr int64_t kRows = kPairRows;

  // Tiles of so many rows and blocks, at least.
  static constexpr int64_t tiles(int64_t rows, int64_t blocks) {
    if (kCols == 2 && blocks > 1) return divide_up(rows, kPairRows) * divide_up(blocks, 3);
    return divide_up(rows, kTallRows > 0 ? kTallRows : kSingleRows) * blocks;
  }

  // out = (out if accumulate) + narrow wide, for a multiple of kRows rows; blocks of out are `out_col_stride` floats
  // apart. step() runs after each tile.
  template <class Step = NoStep, class End = StoreSums>
  static void multiply(const float* narrow, int64_t rows, const float* wide, int64_t wide_stride, int64_t blocks,
                       int64_t units, float* out, int64_t out_stride, int64_t out_col_stride, bool accumulate,
                       const Step& step = {}, const End& end = {}) {
    const auto tile = [&](auto run, int64_t r, int64_t c) __attribute__((always_inline)) {
      run(narrow + r * Units::kUnit.chunk, wide + c * wide_stride, wide_stride, units,
          out + r * out_stride + c * out_col_stride, out_stride, out_col_stride, accumulate, r, end);
      step();
    };
    int64_t first = 0;
    if constexpr (kCols == 2) {
      first = blocks > 1 ? blocks : 0;
      for (int64_t r = 0; r < rows; r += kPairRows)
        for (int64_t c = 0; c < first;) {
          const int64_t left = first - c;
          const bool three = left == 3 || left > 4;  // no single one is left
          tile(three ? product_tile<Units, kPairRows, 3, End> : product_tile<Units, kPairRows, 2, End>, r, c);
          c += three ? 3 : 2;
        }
    }
    for (int64_t c = first; c < blocks; ++c) {
      int64_t r = for_tall_tiles(rows, [&](auto tall, int64_t row) __attribute__((always_inline)) {
        tile(product_tile<Units, tall.value, 1, End>, row, c);
      });
      while (r < rows) {
        const bool tall = r + kSingleRows <= rows;
        tile(tall ? product_tile<Units, kSingleRows, 1, End> : product_tile<Units, kPairRows, 1, End>, r, c);
        r += tall ? kSingleRows : kPairRows;
      }
    }
  }
};

struct Singles : SingleRuns, VectorProducts<Singles> {
  static constexpr DepthUnit kUnit{1};

  WNFUSED_INLINE static Block multiply_add(const Block& a, const Block& b, const Block& sum) {
    return WNFUSED_ISA::multiply_add(a, b, sum);
  }
};

}  // namespace wnfused::cpu::WNFUSED_ISA

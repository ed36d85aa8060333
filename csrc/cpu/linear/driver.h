// The phases of a linear layer (linear_layer.h).
#pragma once

#include "cpu/layer/epilogue.h"
#include "cpu/layer/rows.h"
#include "cpu/linear/split_range.h"
#include "cpu/products/gemm.h"

namespace wnfused::cpu::WNFUSED_ISA {

WNFUSED_INLINE int64_t blocks_of(int64_t lanes) { return divide_up(lanes, kLanes); }

template <class T>
WNFUSED_INLINE Runs<T> runs_of(const Values& matrix, int64_t count, int64_t length, const float* scale = nullptr) {
  return {static_cast<const T*>(matrix.data), count, length, scale};
}

// Sums z^T: those of row r and the block of lanes m are at out + r * row_stride + m * block_stride.
struct OutputSums {
  const float* out;
  int64_t row_stride, block_stride;
};

// Rows [first, first + count) of y, lanes from lane0 on, from z, times `scale` by its rows unless that is null. Whether
// all of z is finite.
template <class T>
inline bool finish_outputs(const LinearForward& job, int64_t first, int64_t count, int64_t lane0, int64_t lanes,
                           const OutputSums& sums, const float* scale) {
  T* y = static_cast<T*>(job.y.data);
  const T* residual = static_cast<const T*>(job.residual.data);
  const Block slope = splat(job.slope);
  Block poison = zero();
  with_activation(job.activation, [&](auto activation) __attribute__((always_inline)) {
    for (int64_t n = 0; n < count; n += kLanes) {
      const int64_t width = smaller(kLanes, count - n), column = first + n;
      const auto of_rows = [&](const float* rows) __attribute__((always_inline)) {
        return width == kLanes ? load(rows) : load(rows, width);
      };
      const Block bias = job.bias ? of_rows(job.bias + column) : zero();
      const Block scales = scale ? of_rows(scale + n) : splat(1);
      for (int64_t m = 0; m < lanes; m += kLanes) {
        const float* out = sums.out + n * sums.row_stride + m / kLanes * sums.block_stride;
        Block block[kLanes];
        WNFUSED_UNROLL for (int i = 0; i < kLanes; ++i) block[i] = load(out + i * sums.row_stride);
        transpose(block);
        const int64_t end = smaller(kLanes, lanes - m);
        const auto finish = [&](auto move) __attribute__((always_inline)) {
          for (int64_t i = 0; i < end; ++i) {
            const int64_t at = (lane0 + m + i) * job.features + column;
            poison = multiply_add(block[i], zero(), poison);
            Block value = multiply_add(block[i], scales, bias);
            if (residual) value = value + move.load(residual + at);
            move.store(y + at, activate<activation.value>(value, slope));
          }
        };
        if (width == kLanes) finish(Whole{});
        else finish(Partial{width});
      }
    }
  });
  return sum_of(poison) == 0;
}

// An item of the forward: `count` rows of v from `first` on, and of x those packed at `wide`, from lane0 on.
template <class Units, class X, class V>
inline void output_item(const LinearForward& job, const WideShape& shape, int64_t first, int64_t count, int64_t lane0,
                        int64_t lanes, const float* wide, float* scratch) {
  const int64_t rows = blocks_of(count) * kLanes;
  const Runs<V> v = runs_of<V>(job.v, job.features, job.inner);
  float scale[kNarrowRows];
  for (int64_t r = 0; r < count; ++r) {
    const V* row = v.data + (first + r) * job.inner;
    const float norm = __builtin_sqrtf(dot(row, row, job.inner));
    if (lane0 == 0) job.norm[first + r] = norm;
    scale[r] = row_scale(job.gain[first + r], norm);
  }
  const Runs<V> w = {v.data + first * job.inner, count, job.inner, scale};
  float *narrow = scratch, *out = narrow + kNarrowFloats<Units>;
  for (int64_t chunk = 0; chunk < shape.chunks; ++chunk) {
    const int64_t units = shape.chunk_units(chunk);
    pack_narrow_along<Units>(w, 0, rows, chunk * Units::kUnit.chunk, units, narrow);
    Units::multiply(narrow, rows, wide + shape.at(chunk, 0), shape.block_floats, blocks_of(lanes), units, out,
                    kWideBlocks * kLanes, kLanes, chunk > 0);
  }
  finish_outputs<X>(job, first, count, lane0, lanes, {out, kWideBlocks * kLanes, kLanes}, nullptr);
}

// Packs what the items of a worker have of x, and calls visit(shape, first, count, lane0, lanes, wide, scratch) with
// their rows of v and of x.
template <class Units, class X, class Visit>
WNFUSED_INLINE void share_outputs(const LinearForward& job, Worker& worker, const Visit& visit) {
  const WideShape shape(job.groups.largest() * kLanes, job.inner, Units::kUnit);
  const Runs<X> x = runs_of<X>(job.x, job.rows, job.inner);
  float* wide = job.memory.x + worker.index() * job.memory.x_stride;
  float* scratch = job.memory.worker + worker.index() * job.memory.worker_stride;
  int64_t packed = -1;
  worker.phase({job.groups.parts * job.row_blocks.parts}, [&](int64_t index) {
    const int64_t group = index / job.row_blocks.parts, part = index % job.row_blocks.parts;
    const int64_t lane0 = job.groups.first(group), lanes = job.groups.size(group, job.rows);
    if (group != packed) {
      for (int64_t chunk = 0; chunk < shape.chunks; ++chunk)
        for (int64_t b = 0; b < blocks_of(lanes); ++b)
          pack_wide_along<Units>(x, lane0 + b * kLanes, chunk * Units::kUnit.chunk, shape.chunk_units(chunk),
                                 shape.piece_floats, wide + shape.at(chunk, b));
      packed = group;
    }
    visit(shape, job.row_blocks.first(part), job.row_blocks.size(part, job.features), lane0, lanes, wide, scratch);
  });
}

template <class Units, class X>
void linear_forward(const LinearForward& job, Worker& worker) {
  share_outputs<Units, X>(job, worker, [&](const WideShape& shape, int64_t first, int64_t count, int64_t lane0,
                                           int64_t lanes, const float* wide, float* scratch) {
    with_entries(job.v, [&](auto* v) {
      using V = std::remove_pointer_t<decltype(v)>;
      output_item<Units, X, V>(job, shape, first, count, lane0, lanes, wide, scratch);
    });
  });
}

// One item's rows and columns of dx.
template <class Units, class X, class V>
inline void input_item(const LinearBackward& job, int64_t row_part, int64_t column_part, float* scratch) {
  constexpr int64_t kStride = row_stride(kWideBlocks);
  constexpr bool kSplit = Units::kUnit.pieces > 1;
  const WideShape shape(job.inner, job.features, Units::kUnit);
  const int64_t row0 = job.input_rows.first(row_part), end = row0 + job.input_rows.size(row_part, job.rows);
  const int64_t column = job.input_columns.first(column_part), width = job.input_columns.size(column_part, job.inner);
  const int64_t blocks = blocks_of(width);
  const Runs<V> v = runs_of<V>(job.v, job.features, job.inner, job.scale);
  const Runs<X> dz = runs_of<X>(job.dz, job.rows, job.features);
  float *narrow = scratch, *wide = narrow + kNarrowFloats<Units>;
  float* out = wide + kWideBlocks * kPackedUnits<Units> * kLanes;
  Sizes columns[kWideBlocks];
  for (int64_t chunk = 0; chunk < shape.chunks; ++chunk) {
    const int64_t first = chunk * Units::kUnit.chunk, units = shape.chunk_units(chunk);
    for (int64_t b = 0; b < blocks; ++b) {
      float* target = wide + b * shape.block_floats;
      pack_wide_across<Units>(v, column + b * kLanes, first, units, shape.piece_floats, target);
      for (int64_t u = 0; kSplit && u < units; ++u) columns[b].gather_pairs(load(target + u * kLanes));
    }
    for (int64_t row = row0; row < end; row += kNarrowRows) {
      const int64_t rows = round_up(smaller(kNarrowRows, end - row), Units::kRows);
      pack_narrow_along<Units>(dz, row, rows, first, units, narrow);
      Units::multiply(narrow, rows, wide, shape.block_floats, blocks, units, out + (row - row0) * kStride, kStride,
                      kLanes, chunk > 0);
    }
  }
  for (int64_t b = 0; kSplit && b < blocks; ++b)
    if (!columns[b].all_in_range()) job.out_of_range->store(true, std::memory_order_relaxed);
  for (int64_t row = row0; row < end; ++row) {
    X* target = static_cast<X*>(job.dx.data) + row * job.inner + column;
    for_blocks(width, [&](int64_t i, auto move) __attribute__((always_inline)) {
      move.store(target + i, load(out + (row - row0) * kStride + i));
    });
  }
}

// One item's rows of dv and of dgain.
template <class Units, class X, class V>
inline void weight_item(const LinearBackward& job, const WideShape& shape, int64_t part, const float* wide,
                        float* scratch) {
  const int64_t first = job.row_blocks.first(part), count = job.row_blocks.size(part, job.features);
  const int64_t rows = blocks_of(count) * kLanes;
  const int64_t stride = row_stride(shape.blocks);
  const Runs<X> dz = runs_of<X>(job.dz, job.rows, job.features);
  float *narrow = scratch, *dw = narrow + kNarrowFloats<Units>;
  for (int64_t chunk = 0; chunk < shape.chunks; ++chunk) {
    const int64_t units = shape.chunk_units(chunk);
    pack_narrow_across<Units>(dz, first, rows, chunk * Units::kUnit.chunk, units, narrow);
    for (int64_t block = 0; block < shape.blocks; block += kWideBlocks)
      Units::multiply(narrow, rows, wide + shape.at(chunk, block), shape.block_floats,
                      smaller(kWideBlocks, shape.blocks - block), units, dw + block * kLanes, stride, kLanes,
                      chunk > 0);
  }
  for (int64_t r = 0; r < count; ++r) {
    const int64_t row = first + r, at = row * job.inner;
    job.dgain[row] = gradient_row(dw + r * stride, static_cast<const V*>(job.v.data) + at,
                                  static_cast<V*>(job.dv.data) + at, job.inner, job.gain[row], job.norm[row]);
  }
}

template <class Units, class X>
void linear_backward(const LinearBackward& job, Worker& worker) {
  const WideShape shape(job.inner, job.rows, Units::kUnit);
  const Runs<X> x = runs_of<X>(job.x, job.rows, job.inner);
  float* wide = job.memory.x + worker.index() * job.memory.x_stride;
  float* scratch = job.memory.worker + worker.index() * job.memory.worker_stride;
  const auto pack = [&](int64_t item) {
    const int64_t block = item / shape.chunks, chunk = item % shape.chunks;
    pack_wide_across<Units>(x, block * kLanes, chunk * Units::kUnit.chunk, shape.chunk_units(chunk), shape.piece_floats,
                            wide + shape.at(chunk, block));
  };
  const int64_t x_items = job.dv.data ? shape.blocks * shape.chunks : 0;
  const int64_t shared_items = job.memory.x_stride == 0 ? x_items : 0;
  const int64_t columns = job.input_columns.parts, inputs = job.dx.data ? columns * job.input_rows.parts : 0;
  worker.phase({shared_items, inputs}, [&](int64_t item) {
    if (item < shared_items) return pack(item);
    item -= shared_items;
    with_entries(job.v, [&](auto* v) {
      using V = std::remove_pointer_t<decltype(v)>;
      input_item<Units, X, V>(job, item / columns, item % columns, scratch);
    });
  });
  if (!job.dv.data) return;
  bool packed = shared_items > 0;
  worker.phase({job.row_blocks.parts}, [&](int64_t item) {
    if (!packed)
      for (int64_t i = 0; i < x_items; ++i) pack(i);
    packed = true;
    with_entries(job.v, [&](auto* v) {
      using V = std::remove_pointer_t<decltype(v)>;
      weight_item<Units, X, V>(job, shape, item, wide, scratch);
    });
  });
}

}  // namespace wnfused::cpu::WNFUSED_ISA

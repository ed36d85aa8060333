// The phases of a 1x1 layer on planes (planes.h).
#pragma once

#include "cpu/layer/epilogue.h"
#include "cpu/layer/rows.h"
#include "cpu/planes/items.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Floats from one row of an item's sums to the next.
constexpr int64_t kPlaneSums = row_stride(kWideBlocks);

WNFUSED_INLINE Runs<float> image_of(const float* maps, int64_t channels, int64_t pixels, int64_t image) {
  return {maps + image * channels * pixels, channels, pixels, nullptr};
}

// Rows [row, row + count) of the sums to y, from block `first` of pixels on.
inline void finish_planes(const PlanesForward& job, int64_t row, int64_t count, int64_t first, int64_t blocks,
                          const float* sums) {
  const PlanesShape& shape = job.shape;
  const Block slope = splat(job.slope);
  with_activation(job.activation, [&](auto activation) __attribute__((always_inline)) {
    for (int64_t b = 0; b < blocks; ++b) {
      const PixelBlock block(shape, first + b);
      PixelLanes<float> y(job.y, shape, shape.outputs, row, block);
      PixelLanes<const float> residual(job.residual ? job.residual : job.y, shape, shape.outputs, row, block);
      with_images(block, [&](auto images) __attribute__((always_inline)) {
        for (int64_t r = 0; r < count; ++r, y.advance(), residual.advance()) {
          Block value = load(sums + r * kPlaneSums + b * kLanes);
          if (job.bias) value = value + splat(job.bias[row + r]);
          if (job.residual) value = value + images.load(residual, block);
          images.store(y, block, activate<activation.value>(value, slope));
        }
      });
    }
  });
}

// The same where it follows the last product at once, of rows from `bias` on.
template <Activation kActivation>
struct FinishedPlanes {
  const float *bias, *residual, *y;
  Block slope;

  WNFUSED_INLINE void operator()(Block sum, float* target, int64_t row) const {
    if (bias) sum = sum + splat(bias[row]);
    if (residual) sum = sum + load(residual + (target - y));
    store(target, activate<kActivation>(sum, slope));
  }
};

// The blocks of pixels of a product, cut where an image ends: those whose lanes are a run are summed where they are to
// be, unless tiles have rows that there are not. The others go by way of sums in scratch memory.
class PlaneRuns {
 public:
  PlaneRuns(const PlanesShape& shape, int64_t rows, int64_t first, int64_t blocks)
      : shape_(shape), first_(first), blocks_(blocks) {
    constexpr int64_t kLong = 128;  // pixels; with fewer there are too many blocks by themselves
    in_place_ = (shape.pixels % kLanes == 0 || shape.pixels >= kLong) && rows % Singles::kRows == 0;
  }

  // run(place, in_place, b, count): `count` blocks from number b on, of which the first is at `place` of its image.
  template <class Run>
  WNFUSED_INLINE void visit(const Run& run) const {
    for (int64_t b = 0; b < blocks_;) {
      const PixelBlock place(shape_, first_ + b);
      const int64_t whole = in_place_ ? (shape_.pixels - place.at) / kLanes : 0;
      const int64_t count = whole > 0 ? smaller(blocks_ - b, whole) : in_place_ ? 1 : blocks_;
      run(place, whole > 0, b, count);
      b += count;
    }
  }

 private:
  const PlanesShape& shape_;
  int64_t first_, blocks_;
  bool in_place_;
};

// The products of packed rows, which are `count` from `row` on, with a chunk of the blocks of pixels, in maps of so
// many channels, or in `sums`.
struct PlaneProducts {
  const PlanesShape& shape;
  const float *narrow, *wide;
  int64_t block_floats, units, row, count;
  float* maps;
  int64_t channels;
  float* sums;

  template <class Step, class End>
  WNFUSED_INLINE void multiply(const PlaneRuns& runs, bool accumulate, const Step& step, const End& end) const {
    runs.visit([&](const PixelBlock& place, bool in_place, int64_t b, int64_t blocks) {
      const float* pixels = wide + b * block_floats;
      if (in_place)
        Singles::multiply(narrow, count, pixels, block_floats, blocks, units,
                          maps + (place.image * channels + row) * shape.pixels + place.at, shape.pixels, kLanes,
                          accumulate, step, end);
      else
        Singles::multiply(narrow, blocks_of(count) * kLanes, pixels, block_floats, blocks, units, sums + b * kLanes,
                          kPlaneSums, kLanes, accumulate, step);
    });
  }
};

inline void planes_forward(const PlanesForward& job, Worker& worker) {
  const PlanesShape& shape = job.shape;
  float* wide = job.memory.x + worker.index() * job.memory.x_stride;
  float* narrow = job.memory.worker + worker.index() * job.memory.worker_stride;
  float* sums = narrow + kNarrowFloats<Singles>;
  PlaneItems items(shape, job.groups, job.row_blocks, job.x, shape.inputs, worker, wide);
  worker.phase({items.count()}, [&](int64_t item) {
    items.visit(
        item, [&](const WideShape& depth, int64_t part, int64_t first, int64_t blocks, const auto& step) {
          const int64_t row = job.row_blocks.first(part), count = job.row_blocks.size(part, shape.outputs);
          const int64_t rows = blocks_of(count) * kLanes;
          const PlaneRuns runs(shape, count, first, blocks);
          float scale[kNarrowRows];
          for (int64_t r = 0; r < count; ++r) {
            const float* values = job.v + (row + r) * shape.inputs;
            const float norm = __builtin_sqrtf(dot(values, values, shape.inputs));
            if (first == 0) job.norm[row + r] = norm;
            scale[r] = row_scale(job.gain[row + r], norm);
          }
          const Runs<float> w = {job.v + row * shape.inputs, count, shape.inputs, scale};
          for (int64_t chunk = 0; chunk < depth.chunks; ++chunk) {
            const int64_t units = depth.chunk_units(chunk);
            pack_narrow_along<Singles>(w, 0, rows, chunk * Singles::kUnit.chunk, units, narrow);
            const PlaneProducts products{shape, narrow, wide + depth.at(chunk, 0), depth.block_floats, units,
                                         row,   count,  job.y,                     shape.outputs,      sums};
            if (chunk + 1 < depth.chunks) {
              products.multiply(runs, chunk > 0, step, StoreSums{});
              continue;
            }
            with_activation(job.activation, [&](auto activation) __attribute__((always_inline)) {
              const float* bias = job.bias ? job.bias + row : nullptr;
              products.multiply(runs, chunk > 0, step,
                                FinishedPlanes<activation.value>{bias, job.residual, job.y, splat(job.slope)});
            });
          }
          runs.visit([&](const PixelBlock&, bool in_place, int64_t b, int64_t run_blocks) {
            if (!in_place) finish_planes(job, row, count, first + b, run_blocks, sums + b * kLanes);
          });
        });
  });
}

// Rows [row, row + count) of dx, from block `first` of pixels on.
inline void store_planes(const PlanesBackward& job, int64_t row, int64_t count, int64_t first, int64_t blocks,
                         const float* sums) {
  const PlanesShape& shape = job.shape;
  for (int64_t b = 0; b < blocks; ++b) {
    const PixelBlock block(shape, first + b);
    PixelLanes<float> dx(job.dx, shape, shape.inputs, row, block);
    with_images(block, [&](auto images) __attribute__((always_inline)) {
      for (int64_t r = 0; r < count; ++r, dx.advance())
        images.store(dx, block, load(sums + r * kPlaneSums + b * kLanes));
    });
  }
}

// Where a chunk of dw's depth lies: run(image, first pixel, pixels, units before it).
template <class Run>
WNFUSED_INLINE void for_depth(const PlanesShape& shape, const PixelDepth& depth, int64_t chunk, const Run& run) {
  if (depth.pieces > 1) {
    const int64_t at = chunk % depth.pieces * depth.length;
    return run(chunk / depth.pieces, at, smaller(depth.length, shape.pixels - at), int64_t{0});
  }
  const int64_t first = chunk * depth.images, end = smaller(first + depth.images, shape.images);
  for (int64_t image = first; image < end; ++image)
    run(image, int64_t{0}, shape.pixels, (image - first) * shape.pixels);
}

inline int64_t depth_units(const PlanesShape& shape, const PixelDepth& depth, int64_t chunk) {
  int64_t units = 0;
  for_depth(shape, depth, chunk, [&](int64_t, int64_t, int64_t pixels, int64_t) { units += pixels; });
  return units;
}

inline void planes_backward(const PlanesBackward& job, Worker& worker) {
  const PlanesShape& shape = job.shape;
  const PixelDepth depth(shape);
  const int64_t channels = blocks_of(shape.inputs), block_floats = depth.units() * kLanes;
  float* wide = job.memory.x + worker.index() * job.memory.x_stride;
  float* narrow = job.memory.worker + worker.index() * job.memory.worker_stride;
  float* sums = narrow + kNarrowFloats<Singles>;
  const Runs<float> w = {job.v, shape.outputs, shape.inputs, job.scale};
  const int64_t copies = job.dv ? depth.chunks * channels : 0;
  PlaneItems items(shape, job.groups, job.input_blocks, job.dz, shape.outputs, worker, wide);
  const int64_t inputs = job.dx ? items.count() : 0;
  worker.phase({inputs, copies}, [&](int64_t item) {
    if (item < inputs) {
      items.visit(
          item, [&](const WideShape& outputs, int64_t part, int64_t first, int64_t blocks, const auto& step) {
            const int64_t row = job.input_blocks.first(part), count = job.input_blocks.size(part, shape.inputs);
            const int64_t rows = blocks_of(count) * kLanes;
            const PlaneRuns runs(shape, count, first, blocks);
            for (int64_t chunk = 0; chunk < outputs.chunks; ++chunk) {
              const int64_t units = outputs.chunk_units(chunk);
              pack_narrow_across<Singles>(w, row, rows, chunk * Singles::kUnit.chunk, units, narrow);
              const PlaneProducts products{shape, narrow, wide + outputs.at(chunk, 0), outputs.block_floats, units, row,
                                           count, job.dx, shape.inputs, sums};
              products.multiply(runs, chunk > 0, step, StoreSums{});
            }
            runs.visit([&](const PixelBlock&, bool in_place, int64_t b, int64_t run_blocks) {
              if (!in_place) store_planes(job, row, count, first + b, run_blocks, sums + b * kLanes);
            });
          });
      return;
    }
    item -= inputs;
    const int64_t chunk = item / channels, block = item % channels;
    for_depth(shape, depth, chunk, [&](int64_t image, int64_t at, int64_t pixels, int64_t before) {
      const Runs<float> map = image_of(job.x, shape.inputs, shape.pixels, image);
      pack_wide_along<Singles>(map, block * kLanes, at, pixels, 0, job.inputs + item * block_floats + before * kLanes);
    });
  });
  if (!job.dv) return;
  const int64_t stride = row_stride(channels);
  worker.phase({job.row_blocks.parts * job.columns.parts}, [&](int64_t item) {
    const int64_t part = item / job.columns.parts, row = job.row_blocks.first(part);
    const int64_t rows = blocks_of(job.row_blocks.size(part, shape.outputs)) * kLanes;
    const int64_t column = job.columns.begin(item % job.columns.parts);
    const int64_t blocks = job.columns.begin(item % job.columns.parts + 1) - column;
    for (int64_t chunk = 0; chunk < depth.chunks; ++chunk) {
      for_depth(shape, depth, chunk, [&](int64_t image, int64_t at, int64_t pixels, int64_t before) {
        const Runs<float> map = image_of(job.dz, shape.outputs, shape.pixels, image);
        pack_narrow_along<Singles>(map, row, rows, at, pixels, narrow + before);
      });
      Singles::multiply(narrow, rows, job.inputs + (chunk * channels + column) * block_floats, block_floats, blocks,
                        depth_units(shape, depth, chunk), job.dw + row * stride + column * kLanes, stride, kLanes,
                        chunk > 0);
    }
  });
  worker.phase({job.row_blocks.count}, [&](int64_t block) {
    for (int64_t row = block * kLanes; row < smaller((block + 1) * kLanes, shape.outputs); ++row)
      job.dgain[row] = gradient_row(job.dw + row * stride, job.v + row * shape.inputs, job.dv + row * shape.inputs,
                                    shape.inputs, job.gain[row], job.norm[row]);
  });
}

}  // namespace wnfused::cpu::WNFUSED_ISA

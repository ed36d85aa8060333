// The phases of a 1x1 layer on planes (planes.h).
#pragma once

#include "cpu/layer/epilogue.h"
#include "cpu/layer/rows.h"
#include "cpu/linear/driver.h"
#include "cpu/planes/planes.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Floats from one row of an item's sums to the next.
constexpr int64_t kPlaneSums = row_stride(kWideBlocks);

// A channel's entries of a block of pixels in maps [images, channels, pixels].
template <class T>
struct PixelLanes {
  T *first, *second;  // lane i is at first + i, of the next image at second + i
  int64_t step;       // to the next channel

  PixelLanes(T* maps, const PlanesShape& shape, int64_t channels, int64_t channel, const PixelBlock& block)
      : first(maps + (block.image * channels + channel) * shape.pixels + block.at),
        second(first - block.at + channels * shape.pixels - block.first),
        step(shape.pixels) {}

  WNFUSED_INLINE void advance() {
    first += step;
    second += step;
  }
};

// A block whose lanes are a run, and one that is at the end of an image.
struct OneImage {
  WNFUSED_INLINE static Block load(const PixelLanes<const float>& lanes, const PixelBlock&) {
    return WNFUSED_ISA::load(lanes.first);
  }
  WNFUSED_INLINE static void store(const PixelLanes<float>& lanes, const PixelBlock&, const Block& value) {
    WNFUSED_ISA::store(lanes.first, value);
  }
};

struct TwoImages {
  WNFUSED_INLINE static Block load(const PixelLanes<const float>& lanes, const PixelBlock& block) {
    return load_two(lanes.first, block.first, lanes.second, block.count);
  }
  WNFUSED_INLINE static void store(const PixelLanes<float>& lanes, const PixelBlock& block, const Block& value) {
    store_two(lanes.first, block.first, lanes.second, block.count, value);
  }
};

template <class Visit>
WNFUSED_INLINE void with_images(const PixelBlock& block, const Visit& visit) {
  if (block.first == kLanes) visit(OneImage{});
  else visit(TwoImages{});
}

WNFUSED_INLINE Runs<float> image_of(const float* maps, int64_t channels, int64_t pixels, int64_t image) {
  return {maps + image * channels * pixels, channels, pixels, nullptr};
}

// Blocks [first, first + count) of pixels of all channels, in chunks of the depth.
inline void pack_pixels(const PlanesShape& shape, const float* maps, int64_t channels, int64_t first, int64_t count,
                        const WideShape& wide, float* target) {
  for (int64_t chunk = 0; chunk < wide.chunks; ++chunk)
    for (int64_t b = 0; b < count; ++b) {
      const PixelBlock block(shape, first + b);
      PixelLanes<const float> lanes(maps, shape, channels, chunk * Singles::kUnit.chunk, block);
      float* packed = target + wide.at(chunk, b);
      with_images(block, [&](auto images) __attribute__((always_inline)) {
        for (int64_t u = 0; u < wide.chunk_units(chunk); ++u, lanes.advance())
          store(packed + u * kLanes, images.load(lanes, block));
      });
    }
}

// Visits the items of a worker, groups of pixel blocks by parts of rows, with that group packed.
template <class Visit>
WNFUSED_INLINE void for_plane_items(const PlanesShape& shape, const Cut& groups, const float* maps, int64_t channels,
                                    int64_t item, int64_t parts, int64_t& packed, float* memory, const Visit& visit) {
  const int64_t group = item / parts, first = groups.begin(group), count = groups.begin(group + 1) - first;
  const WideShape wide(groups.largest() * kLanes, channels, Singles::kUnit);
  if (group != packed) pack_pixels(shape, maps, channels, first, count, wide, memory);
  packed = group;
  visit(wide, item % parts, first, count);
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

inline void planes_forward(const PlanesForward& job, Worker& worker) {
  const PlanesShape& shape = job.shape;
  float* wide = job.memory.x + worker.index() * job.memory.x_stride;
  float* narrow = job.memory.worker + worker.index() * job.memory.worker_stride;
  float* sums = narrow + kNarrowFloats<Singles>;
  int64_t packed = -1;
  worker.phase({job.groups.parts * job.row_blocks.parts}, [&](int64_t item) {
    for_plane_items(
        shape, job.groups, job.x, shape.inputs, item, job.row_blocks.parts, packed, wide,
        [&](const WideShape& depth, int64_t part, int64_t first, int64_t blocks) {
          const int64_t row = job.row_blocks.first(part), count = job.row_blocks.size(part, shape.outputs);
          const int64_t rows = blocks_of(count) * kLanes;
          float scale[kNarrowRows];
          for (int64_t r = 0; r < count; ++r) {
            const float* values = job.v + (row + r) * shape.inputs;
            const float norm = __builtin_sqrtf(dot(values, values, shape.inputs));
            if (first == 0) job.norm[row + r] = norm;
            scale[r] = norm == 0 ? 0.0f : job.gain[row + r] / norm;
          }
          const Runs<float> w = {job.v + row * shape.inputs, count, shape.inputs, scale};
          for (int64_t chunk = 0; chunk < depth.chunks; ++chunk) {
            const int64_t units = depth.chunk_units(chunk);
            pack_narrow_along<Singles>(w, 0, rows, chunk * Singles::kUnit.chunk, units, narrow);
            Singles::multiply(narrow, rows, wide + depth.at(chunk, 0), depth.block_floats, blocks, units, sums,
                              kPlaneSums, kLanes, chunk > 0);
          }
          finish_planes(job, row, count, first, blocks, sums);
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
  for (int64_t image = first; image < end; ++image) run(image, int64_t{0}, shape.pixels, (image - first) * shape.pixels);
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
  const int64_t inputs = job.dx ? job.groups.parts * job.input_blocks.parts : 0;
  int64_t packed = -1;
  worker.phase({inputs, copies}, [&](int64_t item) {
    if (item < inputs) {
      for_plane_items(
          shape, job.groups, job.dz, shape.outputs, item, job.input_blocks.parts, packed, wide,
          [&](const WideShape& outputs, int64_t part, int64_t first, int64_t blocks) {
            const int64_t row = job.input_blocks.first(part), count = job.input_blocks.size(part, shape.inputs);
            const int64_t rows = blocks_of(count) * kLanes;
            for (int64_t chunk = 0; chunk < outputs.chunks; ++chunk) {
              const int64_t units = outputs.chunk_units(chunk);
              pack_narrow_across<Singles>(w, row, rows, chunk * Singles::kUnit.chunk, units, narrow);
              Singles::multiply(narrow, rows, wide + outputs.at(chunk, 0), outputs.block_floats, blocks, units, sums,
                                kPlaneSums, kLanes, chunk > 0);
            }
            store_planes(job, row, count, first, blocks, sums);
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

// Regions of maps, one block of channels of them: read and written where they are, or by copies with zeros around.
#pragma once

#include "cpu/conv/maps.h"
#include "cpu/depthwise/depthwise.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Pixels of one block of channels, of a map of the caller's or a worker's own: `step` entries from one to the next.
template <class T>
struct PixelsOf {
  T* data;
  int64_t row_step, step;

  T* at(int64_t row, int64_t column) const { return data + row * row_step + column * step; }
};
using Pixels = PixelsOf<float>;

// The pixels of a region, one row after another.
WNFUSED_INLINE Pixels packed_pixels(float* data, const Region& region) {
  return {data, region.columns.count() * kLanes, kLanes};
}

// Whether a block of a map is whole and can be read where it is, converted or not.
WNFUSED_INLINE bool lies_open(const ExternalMap& map, const MapShape& shape, int64_t block) {
  return interleaved(map) && shape.channels - block * kLanes >= kLanes;
}

// Whether it can be written there, too.
WNFUSED_INLINE bool lies_open_in_floats(const ExternalMap& map, const MapShape& shape, int64_t block) {
  return lies_open(map, shape, block) && !map.bfloat16;
}

// entries: the map's.
template <class T>
WNFUSED_INLINE PixelsOf<T> open_pixels(const ExternalMap& map, T* entries, int64_t image, int64_t block,
                                       const Region& region) {
  const int64_t first = region.rows.begin * map.row_stride + region.columns.begin * map.column_stride;
  return {entries + image * map.image_stride + block * kLanes + first, map.row_stride, map.column_stride};
}

WNFUSED_INLINE Pixels open_floats(const ExternalMap& map, int64_t image, int64_t block, const Region& region) {
  return open_pixels(map, static_cast<float*>(map.data), image, block, region);
}

// Calls use(run, pixel) for the runs of consecutive pixels that a region consists of; `pixel` counts through them.
template <class Use>
WNFUSED_INLINE void for_runs(const MapShape& shape, int64_t image, const Region& region, const Use& use) {
  const int64_t columns = region.columns.count();
  if (columns == shape.width)
    return use(PixelRun{image, region.rows.begin * columns, region.rows.end * columns}, int64_t{0});
  for (int64_t row = region.rows.begin; row < region.rows.end; ++row) {
    const int64_t begin = row * shape.width + region.columns.begin;
    use(PixelRun{image, begin, begin + columns}, (row - region.rows.begin) * columns);
  }
}

// A region of a map, within the map: where it is, or a copy.
inline Pixels read_region(const ExternalMap& map, const MapShape& shape, int64_t image, int64_t block,
                          const Region& region, float* copy) {
  if (lies_open_in_floats(map, shape, block)) return open_floats(map, image, block, region);
  const MapShape one = some_blocks(shape, block, 1);
  for_runs(shape, image, region, [&](const PixelRun& run, int64_t pixel) {
    read_pixels(one, some_blocks(map, block), run, copy + pixel * kLanes);
  });
  return packed_pixels(copy, region);
}

// Where to write a region, and what is left to do once it is written.
inline Pixels target_region(const ExternalMap& map, const MapShape& shape, int64_t image, int64_t block,
                            const Region& region, float* copy) {
  return lies_open_in_floats(map, shape, block) ? open_floats(map, image, block, region) : packed_pixels(copy, region);
}

inline void write_region(const ExternalMap& map, const MapShape& shape, int64_t image, int64_t block,
                         const Region& region, const float* copy) {
  if (lies_open_in_floats(map, shape, block)) return;
  const MapShape one = some_blocks(shape, block, 1);
  for_runs(shape, image, region, [&](const PixelRun& run, int64_t pixel) {
    write_pixels(one, copy + pixel * kLanes, run, some_blocks(map, block));
  });
}

WNFUSED_INLINE void clear_pixels(float* data, int64_t count) {
  for (int64_t t = 0; t < count; ++t) store(data + t * kLanes, zero());
}

// The part of a padded region that the map has.
WNFUSED_INLINE Region inside_of(const MapShape& shape, const Region& region) {
  const int64_t begin = smaller(greater(region.columns.begin, 0), region.columns.end);
  return {region.rows, {begin, greater(smaller(region.columns.end, shape.width), begin)}};
}

// Fills the padded regions of some blocks, `room` pixels from one to the next: zeros around what is `inside`, and there
// value(row)(t, b). All blocks of a pixel in turn, since they lie beside each other in the caller's map.
template <class Value>
WNFUSED_INLINE Pixels pad_regions(const Region& region, const Region& inside, int64_t blocks, int64_t room, float* copy,
                                  const Value& value) {
  const Pixels pixels = packed_pixels(copy, region);
  const int64_t before = inside.columns.begin - region.columns.begin, width = inside.columns.count();
  const int64_t after = region.columns.end - inside.columns.end, stride = room * kLanes;
  for (int64_t row = 0; row < region.rows.count(); ++row) {
    for (int64_t b = 0; b < blocks; ++b) {
      clear_pixels(pixels.at(row, 0) + b * stride, before);
      clear_pixels(pixels.at(row, before + width) + b * stride, after);
    }
    const auto of_row = value(row);
    float* target = pixels.at(row, before);
    for (int64_t t = 0; t < width; ++t, target += kLanes)
      for (int64_t b = 0; b < blocks; ++b) store(target + b * stride, of_row(t, b));
  }
  return pixels;
}

}  // namespace wnfused::cpu::WNFUSED_ISA

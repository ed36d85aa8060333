// Maps in and out of the kernels' own layout [N, H, W, Cp] fp32: the caller's x, y, dy, dx in any strides and type, and
// the canonical saved maps [N, H, W, C]. Runs of pixels of one image are moved by 16 pixels x 16 channels: a copy where
// channels are innermost, a transposition in registers where pixels are, element by element otherwise.
#pragma once

#include <type_traits>

#include "cpu/conv/division.h"
#include "cpu/conv/epilogue.h"
#include "cpu/conv/memory.h"
#include "cpu/conv/parameter_rows.h"
#include "cpu/vec/vec.h"

namespace wnfused::cpu::WNFUSED_ISA {

WNFUSED_INLINE int64_t map_items_per_image(const MapShape& shape) {
  return (shape.height * shape.width + kMapPixels - 1) / kMapPixels;
}

WNFUSED_INLINE int64_t map_items(const MapShape& shape) { return shape.images * map_items_per_image(shape); }

WNFUSED_INLINE int64_t count_of(bool wanted, int64_t items) { return wanted ? items : 0; }

struct PixelRun {
  int64_t image, begin, end;  // pixels within the image
};

WNFUSED_INLINE PixelRun map_run(const MapShape& shape, int64_t item) {
  const int64_t items = map_items_per_image(shape), begin = item % items * kMapPixels;
  return {item / items, begin, smaller(begin + kMapPixels, shape.height * shape.width)};
}

WNFUSED_INLINE int64_t element(const ExternalMap& map, const MapShape& shape, int64_t image, int64_t pixel,
                               int64_t channel) {
  return image * map.image_stride + channel * map.channel_stride + pixel / shape.width * map.row_stride +
         pixel % shape.width * map.column_stride;
}

// Pixels of an image lie one after another.
WNFUSED_INLINE bool planar(const ExternalMap& map, const MapShape& shape) {
  return map.column_stride == 1 && (map.row_stride == shape.width || shape.height == 1);
}

// Channels of a pixel lie one after another.
WNFUSED_INLINE bool interleaved(const ExternalMap& map) { return map.channel_stride == 1; }

WNFUSED_INLINE Block load_elements(const ExternalMap& map, int64_t offset) {
  return map.bfloat16 ? load(static_cast<const uint16_t*>(map.data) + offset)
                      : load(static_cast<const float*>(map.data) + offset);
}

WNFUSED_INLINE void store_elements(const ExternalMap& map, int64_t offset, const Block& value) {
  if (map.bfloat16) store(static_cast<uint16_t*>(map.data) + offset, value);
  else store(static_cast<float*>(map.data) + offset, value);
}

// The first `lanes` channels of a pixel.
WNFUSED_INLINE void copy_lanes(float* target, const float* source, int64_t lanes) {
  const auto copy = [&](auto count) {
    __builtin_memcpy(target, source, count * sizeof(float));
    target += count, source += count, lanes -= count;
  };
  if (lanes >= 8) copy(std::integral_constant<int64_t, 8>());
  if (lanes >= 4) copy(std::integral_constant<int64_t, 4>());
  for (; lanes > 0; --lanes) *target++ = *source++;
}

// Pixels of one image to `target`, one after another.
inline void read_pixels(const MapShape& shape, const ExternalMap& source, const PixelRun& run, float* target) {
  const int64_t padded = shape.padded_channels, count = run.end - run.begin;
  for (int64_t b = 0; b < shape.channel_blocks; ++b) {
    const int64_t channel0 = b * kLanes, lanes = smaller(kLanes, shape.channels - channel0);
    int64_t t = 0;
    if (lanes == kLanes && interleaved(source)) {
      for (; t < count; ++t)
        store(target + t * padded + channel0,
              load_elements(source, element(source, shape, run.image, run.begin + t, channel0)));
    } else if (interleaved(source) && !source.bfloat16) {
      for (; t < count; ++t) {
        float* values = target + t * padded + channel0;
        store(values, zero());
        copy_lanes(values, static_cast<const float*>(source.data) +
                               element(source, shape, run.image, run.begin + t, channel0), lanes);
      }
    } else if (planar(source, shape) && count >= kLanes) {
      // What is left over is part of a last block that begins earlier.
      for (; t < count; t += kLanes) {
        t = smaller(t, count - kLanes);
        Block block[kLanes];
        const int64_t corner = element(source, shape, run.image, 0, channel0) + run.begin + t;
        for (int i = 0; i < kLanes; ++i)
          block[i] = i < lanes ? load_elements(source, corner + i * source.channel_stride) : zero();
        transpose(block);
        WNFUSED_UNROLL for (int i = 0; i < kLanes; ++i) store(target + (t + i) * padded + channel0, block[i]);
      }
    }
    for (; t < count; ++t) {
      float* values = target + t * padded + channel0;
      for (int64_t i = 0; i < kLanes; ++i)
        values[i] = i < lanes ? read({source.data, source.bfloat16},
                                     element(source, shape, run.image, run.begin + t, channel0 + i))
                              : 0.0f;
    }
  }
}

// Blocks [first, first + blocks) of a map's channels, as if there were no others.
inline MapShape some_blocks(const MapShape& shape, int64_t first, int64_t blocks) {
  MapShape some = shape;
  some.channels = smaller(shape.channels - first * kLanes, blocks * kLanes);
  some.channel_blocks = blocks;
  some.padded_channels = blocks * kLanes;
  return some;
}

inline ExternalMap some_blocks(const ExternalMap& map, int64_t first) {
  ExternalMap some = map;
  some.data = static_cast<float*>(map.data) + first * kLanes * map.channel_stride;
  return some;
}

inline void read_map(const MapShape& shape, const ExternalMap& source, int64_t item, float* map) {
  const PixelRun run = map_run(shape, item);
  read_pixels(shape, source, run, map + (run.image * shape.height * shape.width + run.begin) *
                                               shape.padded_channels);
}

// The other way.
inline void write_pixels(const MapShape& shape, const float* source, const PixelRun& run, const ExternalMap& target) {
  const int64_t padded = shape.padded_channels;
  source -= run.begin * padded;
  for (int64_t b = 0; b < shape.channel_blocks; ++b) {
    const int64_t channel0 = b * kLanes, lanes = smaller(kLanes, shape.channels - channel0);
    int64_t pixel = run.begin;
    if (lanes == kLanes && interleaved(target)) {
      for (; pixel < run.end; ++pixel)
        store_elements(target, element(target, shape, run.image, pixel, channel0),
                       load(source + pixel * padded + channel0));
    } else if (interleaved(target) && !target.bfloat16) {
      for (; pixel < run.end; ++pixel)
        copy_lanes(static_cast<float*>(target.data) + element(target, shape, run.image, pixel, channel0),
                   source + pixel * padded + channel0, lanes);
    } else if (planar(target, shape) && run.end - run.begin >= kLanes) {
      for (; pixel < run.end; pixel += kLanes) {
        pixel = smaller(pixel, run.end - kLanes);
        Block block[kLanes];
        WNFUSED_UNROLL for (int i = 0; i < kLanes; ++i) block[i] = load(source + (pixel + i) * padded + channel0);
        transpose(block);
        const int64_t corner = element(target, shape, run.image, 0, channel0) + pixel;
        for (int i = 0; i < lanes; ++i) store_elements(target, corner + i * target.channel_stride, block[i]);
      }
    }
    for (; pixel < run.end; ++pixel)
      for (int64_t i = 0; i < lanes; ++i)
        write({target.data, target.bfloat16}, element(target, shape, run.image, pixel, channel0 + i),
              source[pixel * padded + channel0 + i]);
  }
}

inline void write_map(const MapShape& shape, const float* map, int64_t item, const ExternalMap& target) {
  const PixelRun run = map_run(shape, item);
  write_pixels(shape, map + (run.image * shape.height * shape.width + run.begin) * shape.padded_channels, run, target);
}

// A canonical saved map as the kernels' map.
inline void read_saved(const MapShape& shape, const SavedMap& saved, int64_t item, float* map) {
  const int64_t channels = shape.channels, row = shape.width * channels;
  read_map(shape, {saved.data, saved.bfloat16, shape.height * row, 1, row, channels}, item, map);
}

// The kernels' map as a canonical saved map.
inline void write_saved(const MapShape& shape, const float* map, int64_t item, const SavedMap& saved) {
  const int64_t channels = shape.channels, row = shape.width * channels;
  write_map(shape, map, item, {saved.data, saved.bfloat16, shape.height * row, 1, row, channels});
}

}  // namespace wnfused::cpu::WNFUSED_ISA

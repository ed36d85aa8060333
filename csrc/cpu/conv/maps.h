// Maps in and out of the kernels' own layout [N, H, W, Cp] fp32: the caller's x, y, dy, dx in any strides and type, and
// the canonical saved maps [N, H, W, C]. Runs of pixels of one image are moved by 16 pixels x 16 channels: a copy where
// channels are innermost, a transposition in registers where pixels are, element by element otherwise.
#pragma once

#include <type_traits>

#include "cpu/conv/division.h"
#include "cpu/conv/epilogue.h"
#include "cpu/conv/memory.h"
#include "cpu/conv/parameter_rows.h"
#include "cpu/vec/runs.h"

namespace wnfused::cpu::WNFUSED_ISA {

WNFUSED_INLINE int64_t count_of(bool wanted, int64_t items) { return wanted ? items : 0; }

struct PixelRun {
  int64_t image, begin, end;  // pixels within the image
};

WNFUSED_INLINE PixelRun map_run(const MapShape& shape, int64_t item) {
  const int64_t items = shape.image_runs(), begin = item % items * kMapPixels;
  return {item / items, begin, smaller(begin + kMapPixels, shape.height * shape.width)};
}

WNFUSED_INLINE int64_t element(const ExternalMap& map, const MapShape& shape, int64_t image, int64_t pixel,
                               int64_t channel) {
  return image * map.image_stride + channel * map.channel_stride + pixel / shape.width * map.row_stride +
         pixel % shape.width * map.column_stride;
}

// Where the pixels of a run lie, one after the other.
class PixelPlace {
 public:
  PixelPlace(const ExternalMap& map, const MapShape& shape, const PixelRun& run)
      : at_(element(map, shape, run.image, run.begin, 0)),
        left_(shape.width - run.begin % shape.width),
        width_(shape.width),
        step_(map.column_stride),
        turn_(map.row_stride - shape.width * map.column_stride) {}

  int64_t entry() const { return at_; }

  void advance() {
    at_ += step_;
    if (--left_ > 0) return;
    left_ = width_;
    at_ += turn_;
  }

 private:
  int64_t at_, left_, width_, step_, turn_;
};

// Pixels of an image lie one after another.
WNFUSED_INLINE bool planar(const ExternalMap& map, const MapShape& shape) {
  return map.column_stride == 1 && (map.row_stride == shape.width || shape.height == 1);
}

// Channels of a pixel lie one after another.
WNFUSED_INLINE bool interleaved(const ExternalMap& map) { return map.channel_stride == 1; }

// use(entries) with those of the map in their own type.
template <class Use>
WNFUSED_INLINE void with_entries(const ExternalMap& map, const Use& use) {
  if (map.bfloat16) use(static_cast<uint16_t*>(map.data));
  else use(static_cast<float*>(map.data));
}

// The first `lanes` < 16 channels of a pixel.
WNFUSED_INLINE void copy_lanes(float* target, const float* source, int64_t lanes) {
  const auto copy = [&](auto count) {
    __builtin_memcpy(target, source, count * sizeof(float));
    target += count, source += count, lanes -= count;
  };
  if (lanes >= 8) copy(std::integral_constant<int64_t, 8>());
  if (lanes >= 4) copy(std::integral_constant<int64_t, 4>());
  for (; lanes > 0; --lanes) *target++ = *source++;
}

WNFUSED_INLINE void copy_lanes(float* target, const uint16_t* source, int64_t lanes) {
  for (int64_t i = 0; i < lanes; ++i) target[i] = from_bfloat16(source[i]);
}

WNFUSED_INLINE void copy_lanes(uint16_t* target, const float* source, int64_t lanes) {
  for (int64_t i = 0; i < lanes; ++i) target[i] = to_bfloat16(source[i]);
}

// Pixels of one image to `target`, one after another.
template <class T>
WNFUSED_INLINE void read_entries(const MapShape& shape, const ExternalMap& source, const T* entries,
                                 const PixelRun& run, float* target) {
  const int64_t padded = shape.padded_channels, count = run.end - run.begin;
  PixelPlace place(source, shape, run);
  if (interleaved(source)) {
    const int64_t whole = shape.channels / kLanes * kLanes;
    for (int64_t t = 0; t < count; ++t, place.advance(), target += padded) {
      const T* pixel = entries + place.entry();
      for (int64_t k = 0; k < whole; k += kLanes) store(target + k, load(pixel + k));
      if (whole == padded) continue;
      store(target + whole, zero());
      copy_lanes(target + whole, pixel + whole, shape.channels - whole);
    }
    return;
  }
  const bool blocks = planar(source, shape) && count >= kLanes;
  for (int64_t b = 0; b < shape.channel_blocks && blocks; ++b) {
    const int64_t channel0 = b * kLanes, lanes = smaller(kLanes, shape.channels - channel0);
    const T* corner = entries + place.entry() + channel0 * source.channel_stride;
    // What is left over is part of a last block that begins earlier.
    for (int64_t t = 0; t < count; t += kLanes) {
      t = smaller(t, count - kLanes);
      Block block[kLanes];
      const T* at = corner + t;
      if (lanes == kLanes) {  // by constant indices, so that blocks stay in registers
        WNFUSED_UNROLL for (int i = 0; i < kLanes; ++i) block[i] = load(at + i * source.channel_stride);
      } else {
        for (int i = 0; i < kLanes; ++i) block[i] = i < lanes ? load(at + i * source.channel_stride) : zero();
      }
      transpose(block);
      WNFUSED_UNROLL for (int i = 0; i < kLanes; ++i) store(target + (t + i) * padded + channel0, block[i]);
    }
  }
  for (int64_t t = 0; t < count && !blocks; ++t, place.advance(), target += padded) {
    for (int64_t k = shape.channels; k < padded; ++k) target[k] = 0.0f;
    for (int64_t k = 0; k < shape.channels; ++k)
      copy_lanes(target + k, entries + place.entry() + k * source.channel_stride, 1);
  }
}

inline void read_pixels(const MapShape& shape, const ExternalMap& source, const PixelRun& run, float* target) {
  with_entries(source, [&](const auto* entries) __attribute__((always_inline)) {
    read_entries(shape, source, entries, run, target);
  });
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
  return map.from(first * kLanes * map.channel_stride);
}

inline void read_map(const MapShape& shape, const ExternalMap& source, int64_t item, float* map) {
  const PixelRun run = map_run(shape, item);
  read_pixels(shape, source, run, map + (run.image * shape.height * shape.width + run.begin) *
                                               shape.padded_channels);
}

// The other way.
template <class T>
WNFUSED_INLINE void write_entries(const MapShape& shape, const float* source, const PixelRun& run,
                                  const ExternalMap& target, T* entries) {
  const int64_t padded = shape.padded_channels, count = run.end - run.begin;
  PixelPlace place(target, shape, run);
  if (interleaved(target)) {
    const int64_t whole = shape.channels / kLanes * kLanes;
    for (int64_t t = 0; t < count; ++t, place.advance(), source += padded) {
      T* pixel = entries + place.entry();
      for (int64_t k = 0; k < whole; k += kLanes) store(pixel + k, load(source + k));
      if (whole < shape.channels) copy_lanes(pixel + whole, source + whole, shape.channels - whole);
    }
    return;
  }
  const bool blocks = planar(target, shape) && count >= kLanes;
  for (int64_t b = 0; b < shape.channel_blocks && blocks; ++b) {
    const int64_t channel0 = b * kLanes, lanes = smaller(kLanes, shape.channels - channel0);
    T* corner = entries + place.entry() + channel0 * target.channel_stride;
    for (int64_t t = 0; t < count; t += kLanes) {
      t = smaller(t, count - kLanes);
      Block block[kLanes];
      WNFUSED_UNROLL for (int i = 0; i < kLanes; ++i) block[i] = load(source + (t + i) * padded + channel0);
      transpose(block);
      T* at = corner + t;
      if (lanes == kLanes) {  // by constant indices, so that blocks stay in registers
        WNFUSED_UNROLL for (int i = 0; i < kLanes; ++i) store(at + i * target.channel_stride, block[i]);
      } else {
        for (int i = 0; i < lanes; ++i) store(at + i * target.channel_stride, block[i]);
      }
    }
  }
  for (int64_t t = 0; t < count && !blocks; ++t, place.advance(), source += padded)
    for (int64_t k = 0; k < shape.channels; ++k)
      copy_lanes(entries + place.entry() + k * target.channel_stride, source + k, 1);
}

inline void write_pixels(const MapShape& shape, const float* source, const PixelRun& run, const ExternalMap& target) {
  with_entries(target, [&](auto* entries) __attribute__((always_inline)) {
    write_entries(shape, source, run, target, entries);
  });
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

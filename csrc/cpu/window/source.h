// The map that a window reads, copied to the kernels' layout: a thin one with a border of zeros as wide as the taps
// reach beyond it, so that no tap asks where it is.
#pragma once

#include "cpu/conv/maps.h"
#include "cpu/window/window.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Calls use(run, map) for the pieces of a run that lie in one line each: pixels of the image, and where they are in the
// source.
template <class Use>
WNFUSED_INLINE void for_lines(const Window& window, const PixelRun& run, float* map, const Use& use) {
  const MapShape& shape = window.source;
  for (int64_t pixel = run.begin; pixel < run.end;) {
    const int64_t line = pixel / shape.width, end = smaller((line + 1) * shape.width, run.end);
    use(PixelRun{run.image, pixel, end},
        map + window.padded_index(run.image * shape.height + line, pixel % shape.width) * window.pixel);
    pixel = end;
  }
}

inline void clear_border(const Window& window, int64_t image, float* map) {
  const Triple& size = window.source_size;
  const int64_t channels = window.pixel, line = window.pitch * channels;
  float* target = map + image * window.padded_pixels() * channels;
  const auto clear = [](float* first, int64_t floats) { __builtin_memset(first, 0, floats * sizeof(float)); };
  const auto clear_lines = [&](int64_t lines) {
    clear(target, lines * line);
    target += lines * line;
  };
  clear_lines(window.before.level * window.lines);
  for (int64_t level = 0; level < size.level; ++level) {
    clear_lines(window.before.row);
    for (int64_t row = 0; row < size.row; ++row, target += line) {
      clear(target, window.before.column * channels);
      clear(target + line - window.after.column * channels, window.after.column * channels);
    }
    clear_lines(window.after.row);
  }
  clear_lines(window.after.level * window.lines);
}

WNFUSED_INLINE void copy_run(const float* source, int64_t count, float* target) {
  __builtin_memcpy(target, source, count * sizeof(float));
}

WNFUSED_INLINE void copy_run(const uint16_t* source, int64_t count, float* target) {
  for_blocks(count, [&](int64_t i, auto move) { move.store(target + i, move.load(source + i)); });
}

WNFUSED_INLINE float as_float(float value) { return value; }
WNFUSED_INLINE float as_float(uint16_t value) { return from_bfloat16(value); }

// `count` pixels of a line to `target`, their channels without padding. Channels: as many, or 0 for any number.
template <int Channels, class T>
inline void pack_pixels(const T* source, int64_t channel_stride, int64_t column_stride, int64_t channels, int64_t count,
                        float* target) {
  const int64_t all = Channels ? Channels : channels;
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t k = 0; k < all; ++k) target[t * all + k] = as_float(source[k * channel_stride + t * column_stride]);
  }
}

// Pixels of one line to a thin source, from the first one's channels.
template <class T>
inline void read_thin(const MapShape& shape, const ExternalMap& given, const T* source, int64_t count, float* target) {
  const int64_t channels = shape.channels;
  const bool dense = channels == 1 || given.channel_stride == 1;
  if (dense && given.column_stride == channels) {
    copy_run(source, count * channels, target);
  } else if (channels == 3 && given.column_stride == 1) {
    pack_pixels<3>(source, given.channel_stride, 1, 3, count, target);
  } else {
    pack_pixels<0>(source, given.channel_stride, given.column_stride, channels, count, target);
  }
}

// Item `item` of the source's pixels. The first run of an image makes its border.
inline void read_source(const Window& window, const ExternalMap& given, int64_t item, float* map) {
  const MapShape& shape = window.source;
  if (!window.thin) return read_map(shape, given, item, map);
  const PixelRun run = map_run(shape, item);
  if (run.begin == 0) clear_border(window, run.image, map);
  for_lines(window, run, map, [&](const PixelRun& piece, float* target) {
    const int64_t at = element(given, shape, piece.image, piece.begin, 0), count = piece.end - piece.begin;
    if (given.bfloat16) read_thin(shape, given, static_cast<const uint16_t*>(given.data) + at, count, target);
    else read_thin(shape, given, static_cast<const float*>(given.data) + at, count, target);
  });
}

}  // namespace wnfused::cpu::WNFUSED_ISA

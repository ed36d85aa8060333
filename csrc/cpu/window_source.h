// The map that a window reads: the caller's pixels in the kernels' layout, with a border of zeros as wide as the taps
// reach beyond it, so that no tap asks where it is.
#pragma once

#include "stage_maps.h"
#include "window.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Calls use(run, map) for the pieces of a run that lie in one line each: pixels of the image, and where they are in the
// source.
template <class Use>
WNFUSED_INLINE void for_lines(const Window& window, const PixelRun& run, float* map, const Use& use) {
  const MapShape& shape = window.source;
  for (int64_t pixel = run.begin; pixel < run.end;) {
    const int64_t line = pixel / shape.width, end = smaller((line + 1) * shape.width, run.end);
    use(PixelRun{run.image, pixel, end},
        map + window.padded_index(run.image * shape.height + line, pixel % shape.width) * shape.padded_channels);
    pixel = end;
  }
}

inline void clear_border(const Window& window, int64_t image, float* map) {
  const MapShape& shape = window.source;
  const int64_t channels = shape.padded_channels, line = window.pitch * channels;
  float* target = map + image * window.padded_pixels() * channels;
  const auto clear = [](float* first, int64_t floats) { __builtin_memset(first, 0, floats * sizeof(float)); };
  clear(target, window.before.row * line);
  target += window.before.row * line;
  for (int64_t row = 0; row < shape.height; ++row, target += line) {
    clear(target, window.before.column * channels);
    clear(target + line - window.after.column * channels, window.after.column * channels);
  }
  clear(target, window.after.row * line);
}

// Pixels that lie one after another, into the source. The first run of an image makes its border.
inline void put_pixels(const Window& window, const PixelRun& run, const float* pixels, float* map) {
  const int64_t channels = window.source.padded_channels;
  if (run.begin == 0) clear_border(window, run.image, map);
  for_lines(window, run, map, [&](const PixelRun& piece, float* target) {
    __builtin_memcpy(target, pixels + (piece.begin - run.begin) * channels,
                     (piece.end - piece.begin) * channels * sizeof(float));
  });
}

// Item `item` of the source's pixels. `scratch`: kMapPixels pixels.
inline void read_source(const Window& window, const ExternalMap& given, int64_t item, float* map, float* scratch) {
  const MapShape& shape = window.source;
  if (!window.has_border()) return read_map(shape, given, item, map);
  const PixelRun run = map_run(shape, item);
  if (interleaved(given)) {
    if (run.begin == 0) clear_border(window, run.image, map);
    for_lines(window, run, map,
              [&](const PixelRun& piece, float* target) { read_pixels(shape, given, piece, target); });
  } else {
    read_pixels(shape, given, run, scratch);
    put_pixels(window, run, scratch, map);
  }
}

}  // namespace wnfused::cpu::WNFUSED_ISA

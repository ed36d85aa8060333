// Maps of bfloat16 in and out of the operands' layout, [N, H, W, C].
#pragma once

#include "cpu/conv/maps.h"
#include "cpu/conv/operands.h"

namespace wnfused::cpu::WNFUSED_ISA {

// The first `lanes` < 16 entries.
WNFUSED_INLINE void copy_entries(uint16_t* target, const uint16_t* source, int64_t lanes) {
  for (int64_t i = 0; i < lanes; ++i) target[i] = source[i];
}

WNFUSED_INLINE void copy_run(uint16_t* target, const uint16_t* source, int64_t count) {
  for (; count >= kLanes; count -= kLanes, source += kLanes, target += kLanes)
    __builtin_memcpy(target, source, kLanes * sizeof(uint16_t));
  copy_entries(target, source, count);
}

// Sixteen pixels by sixteen channels, turned: rows `from` apart to rows `to` apart, of which there are so many.
inline void turn_entries(const uint16_t* source, int64_t from, int64_t rows, uint16_t* target, int64_t to,
                         int64_t turned_rows) {
  Block block[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) block[i] = i < rows ? load(source + i * from) : zero();
  transpose(block);
  for (int64_t i = 0; i < turned_rows; ++i) store_rounded(target + i * to, block[i]);
}

// Pixels of one image to `target`, one after another.
inline void read_operand(const MapShape& shape, const ExternalMap& source, const PixelRun& run, uint16_t* target) {
  const int64_t channels = shape.channels, count = run.end - run.begin;
  const uint16_t* entries = static_cast<const uint16_t*>(source.data);
  PixelPlace place(source, shape, run);
  if (interleaved(source)) {
    for (int64_t t = 0; t < count; ++t, place.advance(), target += channels)
      copy_run(target, entries + place.entry(), channels);
    return;
  }
  const bool blocks = planar(source, shape) && count >= kLanes && channels % kLanes == 0;
  for (int64_t channel = 0; channel < channels && blocks; channel += kLanes) {
    const uint16_t* corner = entries + place.entry() + channel * source.channel_stride;
    // What is left over is part of a last block that begins earlier.
    for (int64_t t = 0; t < count; t += kLanes) {
      t = smaller(t, count - kLanes);
      turn_entries(corner + t, source.channel_stride, kLanes, target + t * channels + channel, channels, kLanes);
    }
  }
  for (int64_t t = 0; t < count && !blocks; ++t, place.advance(), target += channels)
    for (int64_t k = 0; k < channels; ++k) target[k] = entries[place.entry() + k * source.channel_stride];
}

// The other way.
inline void write_operand(const MapShape& shape, const uint16_t* source, const PixelRun& run,
                          const ExternalMap& target) {
  const int64_t channels = shape.channels, count = run.end - run.begin;
  uint16_t* entries = static_cast<uint16_t*>(target.data);
  PixelPlace place(target, shape, run);
  if (interleaved(target)) {
    for (int64_t t = 0; t < count; ++t, place.advance(), source += channels)
      copy_run(entries + place.entry(), source, channels);
    return;
  }
  const bool blocks = planar(target, shape) && count >= kLanes && channels % kLanes == 0;
  for (int64_t channel = 0; channel < channels && blocks; channel += kLanes) {
    uint16_t* corner = entries + place.entry() + channel * target.channel_stride;
    for (int64_t t = 0; t < count; t += kLanes) {
      t = smaller(t, count - kLanes);
      turn_entries(source + t * channels + channel, channels, kLanes, corner + t, target.channel_stride, kLanes);
    }
  }
  for (int64_t t = 0; t < count && !blocks; ++t, place.advance(), source += channels)
    for (int64_t k = 0; k < channels; ++k) entries[place.entry() + k * target.channel_stride] = source[k];
}

inline uint16_t* operand(const LayerMap& map) { return reinterpret_cast<uint16_t*>(map.own); }

// Where a run of pixels begins in a map of operands.
WNFUSED_INLINE int64_t first_entry(const MapShape& shape, const PixelRun& run) {
  return (run.image * shape.height * shape.width + run.begin) * shape.channels;
}

}  // namespace wnfused::cpu::WNFUSED_ISA

// The maps that a stage's convolutions read and write, and what they fetch ahead.
//
// Operand is what the convolutions read. float: the stream is an operand itself, and so are saved maps in the kernels'
// own layout; others are converted one phase ahead. bfloat16 (uint16_t): the stream, fp32, has a rounded copy beside
// it, and saved maps are operands, but with recomputation, when they are the stream's.
#pragma once

#include "cpu/conv/maps.h"
#include "cpu/conv3x3/conv.h"
#include "cpu/stage/stage.h"
#include "cpu/vec/prefetch.h"

namespace wnfused::cpu::WNFUSED_ISA {

// v of one convolution; empty if there is no convolution of that number.
WNFUSED_INLINE Upcoming weights_of(const Parameter& v, const Geometry& geometry, int64_t convolution) {
  if (convolution < 0 || convolution >= 2 * geometry.blocks) return {static_cast<const char*>(v.data), 0};
  const int64_t bytes = geometry.channels * geometry.channels * kTaps * (v.bfloat16 ? 2 : 4);
  return {static_cast<const char*>(v.data) + convolution * bytes, bytes};
}

// The part of v that item `item` of convolution `convolution` fetches ahead: v of the convolution that is packed in the
// next phase, in full by every worker that packs it in full. `step`, 1 or -1, is the direction of the walk.
WNFUSED_INLINE Upcoming upcoming_weights(const Parameter& v, const Geometry& geometry, int64_t convolution,
                                         int64_t step, int64_t item) {
  if (geometry.by_bundles) return {nullptr, 0};  // v is more than a cache holds
  const Upcoming all = weights_of(v, geometry, convolution + (geometry.own_banks ? step : 2 * step));
  const int64_t parts = geometry.fetch_parts;
  return all.part(item % parts, parts);
}

WNFUSED_INLINE SavedMap saved_map(const SavedMaps& saved, const Geometry& geometry, int64_t index) {
  const int64_t bytes = geometry.pixels() * geometry.channels * (saved.bfloat16 ? 2 : 4);
  return {static_cast<char*>(saved.data) + index * bytes, saved.bfloat16};
}

template <class Operand>
Operand* saved_in_place(const SavedMaps& saved, const Geometry& geometry, int64_t index) {
  return static_cast<Operand*>(saved_map(saved, geometry, index).data);
}

// A map as the convolutions read it and, for the stream, as it is summed up: the same memory where operands are float.
template <class Operand>
struct StreamMap {
  float* sum;
  Operand* operand;
};

template <class Operand>
constexpr bool is_pair() {
  return sizeof(Operand) == sizeof(uint16_t);
}

template <class Operand>
Operand* as_operand(float* scratch) {
  return reinterpret_cast<Operand*>(scratch);
}

template <class Operand>
StreamMap<Operand> scratch_stream(const Scratch& scratch) {
  return {scratch.stream, as_operand<Operand>(is_pair<Operand>() ? scratch.operand : scratch.stream)};
}

// Fetches what item `item` of a convolution reads of other workers' outputs, before its bank is packed: the lines come
// meanwhile, which from another die takes about as long. Workers that share all maps wrote the other groups' channels,
// others the lines of pixels above and below.
template <class Operand>
inline void fetch_input(const Geometry& geometry, const Worker& worker, int64_t item, const Operand* map) {
  if (is_pair<Operand>() || !geometry.is_winograd() || !worker.is_at_edge(item, geometry.conv_items())) return;
  const auto [chunk, bundle] = geometry.conv_item(item);
  const int64_t channels = geometry.padded_channels;
  const auto fetch = [&](int64_t pixel, int64_t count, int64_t first, int64_t last) {
    for (const Operand* at = map + pixel * channels; count > 0; --count, at += channels)
      for (int64_t b = first; b < last; ++b) __builtin_prefetch(at + b * kLanes);
  };
  if (geometry.weights_stay) {
    constexpr int64_t kMost = 1 << 14;  // floats that a first-level cache holds beside what is packed
    if (geometry.conv_chunks > 1 || geometry.map_size() > kMost) return;
    const int64_t begin = bundle * geometry.conv_bundle_blocks, end = begin + geometry.conv_bundle_blocks;
    fetch(0, geometry.pixels(), 0, begin);
    fetch(0, geometry.pixels(), end, geometry.channel_blocks);
    return;
  }
  const int64_t first = chunk * geometry.conv_rows;
  const Unit top = unit_at(geometry, first);
  const Unit bottom = unit_at(geometry, smaller(first + geometry.conv_rows, geometry.units) - 1);
  const int64_t below = bottom.y + geometry.tile;
  if (top.y > 0) fetch(pixel_index(geometry, {top.image, top.y - 1, 0}), geometry.width, 0, geometry.channel_blocks);
  if (below < geometry.height)
    fetch(pixel_index(geometry, {bottom.image, below, 0}), geometry.width, 0, geometry.channel_blocks);
}

// Whether item `item` of a convolution fetches the lines of its output, the epilogue's operand, before it writes them:
// those that are `fresh`, memory that no worker's cache holds, and those beside another worker's, which has read them.
// Workers that share all maps call lines back when they are needed.
template <class Operand>
inline void fetch_output(const Geometry& geometry, const Worker& worker, int64_t item, bool fresh,
                         ConvEpilogue<Operand>& epilogue) {
  const bool read_beside = !is_pair<Operand>() && worker.is_at_edge(item, geometry.conv_items());
  const bool fetched = !geometry.weights_stay && (fresh || read_beside);
  Operand* map = fetched ? epilogue.operand : nullptr;
  if (epilogue.fresh != map) epilogue.fresh = map;
}

// The rounded copy of a stream map.
template <class Operand>
inline void round_stream(const Geometry& geometry, const StreamMap<Operand>& map, int64_t item) {
  if constexpr (is_pair<Operand>()) {
    const int64_t channels = geometry.channels, line = geometry.operand_line() * channels;
    write_map(geometry, map.sum, item,
              {map.operand + geometry.operand_origin() * channels, true, geometry.operand_image() * channels, 1, line,
               channels});
  }
}

}  // namespace wnfused::cpu::WNFUSED_ISA

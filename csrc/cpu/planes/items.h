// The wide operand of a product of planes (planes.h): blocks of pixels, packed group by group, the next one being
// fetched.
#pragma once

#include "cpu/linear/driver.h"
#include "cpu/planes/planes.h"

namespace wnfused::cpu::WNFUSED_ISA {

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

// Blocks [first, first + count) of pixels of all channels, in chunks of the depth.
inline void pack_pixels(const PlanesShape& shape, const float* maps, int64_t channels, int64_t first, int64_t count,
                        const WideShape& wide, float* target) {
  constexpr int kTogether = 4;
  for (int64_t chunk = 0; chunk < wide.chunks; ++chunk)
    for (int64_t b = 0; b < count; ++b) {
      const PixelBlock block(shape, first + b);
      PixelLanes<const float> lanes(maps, shape, channels, chunk * Singles::kUnit.chunk, block);
      float* packed = target + wide.at(chunk, b);
      if (b + kTogether <= count && block.at + kTogether * kLanes <= shape.pixels) {
        const float* from = lanes.first;
        for (int64_t u = 0; u < wide.chunk_units(chunk); ++u, from += shape.pixels)
          WNFUSED_UNROLL for (int i = 0; i < kTogether; ++i)
            store(packed + i * wide.block_floats + u * kLanes, load(from + i * kLanes));
        b += kTogether - 1;
        continue;
      }
      with_images(block, [&](auto images) __attribute__((always_inline)) {
        for (int64_t u = 0; u < wide.chunk_units(chunk); ++u, lanes.advance())
          store(packed + u * kLanes, images.load(lanes, block));
      });
    }
}

// Blocks [first, first + count) of pixels of all channels, to be fetched in so many steps: packing reads all of them at
// once, and would wait for each line otherwise.
class UpcomingPixels {
 public:
  UpcomingPixels() = default;
  UpcomingPixels(const PlanesShape& shape, const float* maps, int64_t channels, int64_t first, int64_t count,
                 int64_t steps)
      : count_(count), channels_(channels), pixels_(shape.pixels), each_(divide_up(channels * count, steps)) {
    for (int64_t b = 0; b < count; ++b)
      lanes_[b] = PixelLanes<const float>(maps, shape, channels, 0, PixelBlock(shape, first + b)).first;
  }

  WNFUSED_INLINE void step() {
    constexpr int kSecondLevel = 2;
    for (int64_t i = 0; i < each_ && channel_ < channels_; ++i) {
      __builtin_prefetch(lanes_[block_] + channel_ * pixels_, 0, kSecondLevel);
      if (++block_ == count_) block_ = 0, ++channel_;
    }
  }

 private:
  const float* lanes_[kWideBlocks];
  int64_t count_ = 0, channels_ = 0, pixels_ = 0, each_ = 0;
  int64_t channel_ = 0, block_ = 0;  // the next one
};

// The items of a worker: groups of pixel blocks, which it packs, by parts of `rows`.
class PlaneItems {
 public:
  PlaneItems(const PlanesShape& shape, const Cut& groups, const Cut& rows, const float* maps, int64_t channels,
             const Worker& worker, float* memory)
      : shape_(shape), groups_(groups), rows_(rows), maps_(maps), channels_(channels), worker_(worker), memory_(memory),
        wide_(groups.largest() * kLanes, channels, Singles::kUnit) {}

  int64_t count() const { return groups_.parts * rows_.parts; }

  // visit(wide, part of rows, first block, blocks, step), with the group packed; step() belongs after each tile.
  template <class Visit>
  WNFUSED_INLINE void visit(int64_t item, const Visit& visit) {
    const int64_t group = item / rows_.parts, first = groups_.begin(group), blocks = size(group);
    if (group != packed_) {
      pack_pixels(shape_, maps_, channels_, first, blocks, wide_, memory_);
      packed_ = group;
      const int64_t steps = wide_.chunks * rows_.parts * Singles::tiles(rows_.largest() * kLanes, blocks);
      upcoming_ = upcoming(group + 1, steps);
    }
    visit(wide_, item % rows_.parts, first, blocks, [&] { upcoming_.step(); });
  }

 private:
  static constexpr int64_t kStays = int64_t{1} << 17;  // floats of a group, beside which another one stays in L2

  // Of a group that this worker is to pack next.
  UpcomingPixels upcoming(int64_t group, int64_t steps) const {
    if (group == groups_.parts || worker_.is_last(group * rows_.parts - 1, count())) return {};
    if (wide_.size() > kStays) return {};
    return {shape_, maps_, channels_, groups_.begin(group), size(group), steps};
  }

  int64_t size(int64_t group) const { return groups_.begin(group + 1) - groups_.begin(group); }

  const PlanesShape& shape_;
  const Cut &groups_, &rows_;
  const float* maps_;
  int64_t channels_;
  const Worker& worker_;
  float* memory_;
  WideShape wide_;
  int64_t packed_ = -1;
  UpcomingPixels upcoming_;
};

}  // namespace wnfused::cpu::WNFUSED_ISA

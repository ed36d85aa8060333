// The phases of a convolution by strips (strips.h).
#pragma once

#include "cpu/layer/epilogue.h"
#include "cpu/layer/rows.h"
#include "cpu/strips/strips.h"
#include "cpu/vec/prefetch.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Blocks of places that a tile sums for so many channels of the target: what fits the register file beside a Block of
// each.
constexpr int tile_blocks(int targets) { return kParts == 1 ? 6 : targets == 1 ? 4 : targets == 4 ? 1 : 2; }
constexpr int kUnitBlocks = kParts == 1 ? 3 : 2;

// The same for dw, of channels and taps of the source.
constexpr int tile_taps(int targets) {
  return kParts == 1 ? 6 : targets == 2 || targets == 3 ? 2 : targets == 1 ? 3 : 1;
}

// visit(std::integral_constant<int, targets>)
template <class Visit>
WNFUSED_INLINE void with_targets(int64_t targets, const Visit& visit) {
  switch (targets) {
    case 1: return visit(std::integral_constant<int, 1>{});
    case 2: return visit(std::integral_constant<int, 2>{});
    case 3: return visit(std::integral_constant<int, 3>{});
    default: return visit(std::integral_constant<int, 4>{});
  }
}

// `count` pixels that are `stride` apart, and zeros up to `length`. What is written ends with whole blocks.
WNFUSED_INLINE void copy_line(const float* source, int64_t stride, int64_t count, int64_t length, float* target) {
  if (stride == 1) {
    for_blocks(count,
               [&](int64_t i, auto move) __attribute__((always_inline)) { store(target + i, move.load(source + i)); });
  } else if (stride == 2) {  // a number that the compiler knows gives shuffles
    for (int64_t i = 0; i < count; ++i) target[i] = source[2 * i];
  } else {
    for (int64_t i = 0; i < count; ++i) target[i] = source[stride * i];
  }
  for (int64_t i = count; i < length; i += kLanes) store(target + i, zero());
}

// Which pixels of a map the places stand for.
struct StripPixels {
  StripAxis rows, columns;
  StripPhase phase;
};

// The lines of places [first, first + count).
inline int64_t find_lines(const Strips& strips, const StripPixels& pixels, const StripLayout& map, int64_t first,
                          int64_t count, StripLine* lines) {
  const StripAxis &rows = pixels.rows, &columns = pixels.columns;
  const int64_t size = strips.pitch * strips.image_lines;
  const int64_t height = rows.count(pixels.phase.row), width = columns.count(pixels.phase.column);
  int64_t image = first >= 0 ? first / size : -((size - 1 - first) / size), found = 0;
  int64_t row = (first - image * size) / strips.pitch, column = first - image * size - row * strips.pitch;
  for (int64_t done = 0; done < count;) {
    const int64_t places = smaller(strips.pitch - column, count - done);
    const bool inside = image >= 0 && image < strips.images && row < height && column < width;
    const int64_t line = row * rows.stride + pixels.phase.row, pixel = column * columns.stride + pixels.phase.column;
    const StripLine part{done, places, inside ? image * map.image + (line * columns.pixels + pixel) * map.pixel : 0,
                         inside ? smaller(width - column, places) : 0};
    const auto goes_on = [&](const StripLine& last) {
      return last.pixels == last.places && part.pixels > 0 && last.at + last.pixels * map.pixel == part.at;
    };
    if (found > 0 && columns.stride == 1 && goes_on(lines[found - 1])) {
      lines[found - 1].places += part.places;
      lines[found - 1].pixels += part.pixels;
    } else {
      lines[found++] = part;
    }
    done += places;
    column = 0;
    if (++row == strips.image_lines) {
      row = 0;
      ++image;
    }
  }
  return found;
}

// A worker's memory (StripRoom).
struct StripScratch {
  float *sources, *targets, *weights;
  StripLine* lines;

  StripScratch(const StripRoom& room, float* memory)
      : sources(memory),
        targets(memory + room.targets),
        weights(memory + room.weights),
        lines(reinterpret_cast<StripLine*>(memory + room.lines)) {}
};

// The pixels of up to 16 channels that lie side by side, into as many planes.
inline void copy_turned(const StripLine& line, const float* source, int64_t stride, int64_t channels, float* target,
                        int64_t plane_floats) {
  for (int64_t i = 0; i < line.places; i += kLanes) {
    Block block[kLanes];
    for (int64_t j = 0; j < kLanes; ++j) {
      const float* pixel = source + (i + j) * stride;
      block[j] = i + j >= line.pixels ? zero() : channels == kLanes ? load(pixel) : load(pixel, channels);
    }
    transpose(block);
    for (int64_t c = 0; c < channels; ++c) store(target + c * plane_floats + i, block[c]);
  }
}

// Channels [first, first + count) of a map along these lines, whose pixels are `stride` apart.
inline void copy_channels(const StripSource& map, int64_t first, int64_t count, const StripLine* lines,
                          int64_t line_count, int64_t stride, float* target, int64_t plane_floats) {
  const StripLayout& layout = map.layout;
  const StripLine* end = lines + line_count;
  if (layout.has_pixels_apart() && count > kFewTurned) {
    for (int64_t c = 0; c < count; c += kLanes)
      for (const StripLine* line = lines; line != end; ++line)
        copy_turned(*line, map.data + line->at + first + c, stride * layout.pixel, smaller(kLanes, count - c),
                    target + c * plane_floats + line->done, plane_floats);
    return;
  }
  constexpr int64_t kAhead = 8;  // as in finish_strip
  const int64_t pixel = stride * layout.pixel;
  for (int64_t c = 0; c < count; ++c)
    for (const StripLine* line = lines; line != end; ++line) {
      const float* source = map.data + line->at + (first + c) * layout.channel;
      if (c + kAhead < count)
        for (int64_t i = 0; i < line->pixels * pixel; i += kLanes)
          __builtin_prefetch(source + kAhead * layout.channel + i);
      copy_line(source, pixel, line->pixels, line->places, target + c * plane_floats + line->done);
    }
}

// All that the taps of a strip reach of a group's source channels.
inline void copy_sources(const StripPlan& plan, const StripSource& map, int64_t group, int64_t strip,
                         const StripScratch& scratch) {
  const Strips& strips = plan.strips;
  const StripCut& cut = plan.cut;
  const int64_t first = strip * cut.span + strips.low, count = cut.span + strips.high - strips.low;
  const int64_t planes = static_cast<int64_t>(strips.planes.size());
  for (int64_t p = 0; p < planes; ++p) {
    const StripPixels pixels{strips.source_rows, strips.source_columns, strips.planes[p]};
    const int64_t lines = find_lines(strips, pixels, map.layout, first, count, scratch.lines);
    copy_channels(map, group * strips.sources, strips.sources, scratch.lines, lines, strips.source_columns.stride,
                  scratch.sources + p * cut.source_floats, planes * cut.source_floats);
  }
}

// The lines of a strip of one phase of the target.
inline int64_t target_lines(const StripPlan& plan, const StripLayout& map, const StripPhase& phase, int64_t strip,
                            StripLine* lines) {
  const Strips& strips = plan.strips;
  const StripCut& cut = plan.cut;
  return find_lines(strips, {strips.target_rows, strips.target_columns, phase}, map, strip * cut.span, cut.span, lines);
}

// A group's weights way by way, kStripTargets channels at a time, [channel and tap of the source][target]. Whether all
// are finite.
inline bool pack_group(const StripSums& job, int64_t group, float* packed) {
  const Strips& strips = job.plan->strips;
  const int64_t taps = strips.channel_taps, channels = job.back ? strips.targets : strips.sources;
  float poison = 0;
  for (const StripWay& way : strips.ways)
    for (int64_t first = 0; first < strips.targets; first += kStripTargets) {
      const int64_t targets = smaller(kStripTargets, strips.targets - first);
      const auto add = [&](int64_t s, const StripTap& tap) __attribute__((always_inline)) {
        for (int64_t t = first; t < first + targets; ++t) {
          const int64_t row = job.back ? group * strips.sources + s : group * strips.targets + t;
          const int64_t channel = job.back ? t : s;
          const int64_t at = strips.taps_first ? tap.weight * channels + channel : channel * taps + tap.weight;
          const float weight = job.v[row * channels * taps + at] * job.scale[row];
          poison += weight * 0.0f;
          *packed++ = weight;
        }
      };
      if (strips.taps_first)
        for (const StripTap& tap : way.taps)
          for (int64_t s = 0; s < strips.sources; ++s) add(s, tap);
      else
        for (int64_t s = 0; s < strips.sources; ++s)
          for (const StripTap& tap : way.taps) add(s, tap);
    }
  return poison == 0;
}

// Sums for kTargets channels and kBlocks blocks of places.
template <int kTargets, int kBlocks>
WNFUSED_INLINE void sum_tile(const float* source, const int64_t* offsets, int64_t depth, const float* weights,
                             float* out, int64_t out_stride) {
  Block sum[kTargets][kBlocks];
  WNFUSED_UNROLL for (int t = 0; t < kTargets; ++t)
    WNFUSED_UNROLL for (int b = 0; b < kBlocks; ++b) sum[t][b] = zero();
  for (int64_t k = 0; k < depth; ++k) {
    const float* at = source + offsets[k];
    Block entry[kBlocks];
    WNFUSED_UNROLL for (int b = 0; b < kBlocks; ++b) entry[b] = load(at + b * kLanes);
    WNFUSED_UNROLL for (int t = 0; t < kTargets; ++t) {
      const Block weight = splat(weights[k * kTargets + t]);
      WNFUSED_UNROLL for (int b = 0; b < kBlocks; ++b) sum[t][b] = multiply_add(weight, entry[b], sum[t][b]);
    }
  }
  WNFUSED_UNROLL for (int t = 0; t < kTargets; ++t)
    WNFUSED_UNROLL for (int b = 0; b < kBlocks; ++b) store(out + t * out_stride + b * kLanes, sum[t][b]);
}

// `count` pixels that are `stride` apart, as a block and back.
WNFUSED_INLINE Block load_apart(const float* source, int64_t stride, int64_t count) {
  float entries[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) entries[i] = source[i * stride];
  return load(entries);
}
WNFUSED_INLINE void store_apart(float* target, int64_t stride, int64_t count, const Block& block) {
  float entries[kLanes];
  store(entries, block);
  for (int64_t i = 0; i < count; ++i) target[i * stride] = entries[i];
}

// The sums of one channel of the target to where they belong, `stride` apart.
template <Activation kActivation>
WNFUSED_INLINE void finish_channel(const StripSums& job, int64_t channel, const StripLine& line, int64_t stride,
                                   const float* sums) {
  const Block slope = splat(job.slope), bias = splat(job.bias ? job.bias[channel] : 0.0f);
  const int64_t at = line.at + channel * job.target.layout.channel;
  for_blocks(line.pixels, [&](int64_t i, auto move) __attribute__((always_inline)) {
    const int64_t place = at + i * stride, left = smaller(kLanes, line.pixels - i);
    Block value = move.load(sums + line.done + i) + bias;
    if (job.residual)
      value = value + (stride == 1 ? move.load(job.residual + place) : load_apart(job.residual + place, stride, left));
    value = activate<kActivation>(value, slope);
    if (stride == 1) move.store(job.target.data + place, value);
    else store_apart(job.target.data + place, stride, left, value);
  });
}

// The same of up to 16 channels that lie side by side.
template <Activation kActivation>
WNFUSED_INLINE void finish_turned(const StripSums& job, int64_t first, int64_t channels, const StripLine& line,
                                  int64_t stride, const float* sums) {
  const Block slope = splat(job.slope), bias = job.bias ? load(job.bias + first, channels) : zero();
  for (int64_t i = 0; i < line.pixels; i += kLanes) {
    Block block[kLanes];
    for (int64_t c = 0; c < kLanes; ++c)
      block[c] = c < channels ? load(sums + c * job.plan->cut.target_floats + line.done + i) : zero();
    transpose(block);
    const auto finish = [&](auto move) __attribute__((always_inline)) {
      for (int64_t j = 0; j < smaller(kLanes, line.pixels - i); ++j) {
        const int64_t place = line.at + first + (i + j) * stride;
        Block value = block[j] + bias;
        if (job.residual) value = value + move.load(job.residual + place);
        move.store(job.target.data + place, activate<kActivation>(value, slope));
      }
    };
    if (channels == kLanes) finish(Whole{});
    else finish(Partial{channels});
  }
}

// The sums of channels [first, first + count) of the target, a plane each.
inline void finish_strip(const StripSums& job, int64_t first, int64_t count, const StripLine* lines, int64_t line_count,
                         const float* sums) {
  const int64_t stride = job.plan->strips.target_columns.stride * job.target.layout.pixel;
  with_activation(job.activation, [&](auto activation) __attribute__((always_inline)) {
    for (const StripLine* line = lines; line != lines + line_count; ++line) {
      if (line->pixels == 0) continue;
      if (job.target.layout.has_pixels_apart() && count > kFewTurned) {
        finish_turned<activation.value>(job, first, count, *line, stride, sums);
      } else {
        // A channel's part of a line is too short for the processor to see where the next ones are.
        constexpr int64_t kAhead = 4;
        const int64_t channel = job.target.layout.channel;
        for (int64_t c = 0; c < count; ++c) {
          if (c + kAhead < count) {
            const float* next = job.target.data + line->at + (first + c + kAhead) * channel;
            WNFUSED_UNROLL for (int i = 0; i < 2; ++i) prefetch_for_writing(next + i * kLanes);
          }
          finish_channel<activation.value>(job, first + c, *line, stride, sums + c * job.plan->cut.target_floats);
        }
      }
    }
  });
}

// An item, strips group by group. `packed` is the group whose weights the worker has.
inline void sum_strip(const StripSums& job, int64_t item, int64_t& packed, float* memory, std::atomic<bool>& finite) {
  const Strips& strips = job.plan->strips;
  const StripCut& cut = job.plan->cut;
  const int64_t group = item / cut.count, strip = item % cut.count;
  const int64_t end = smaller(cut.span, strips.places() - strip * cut.span);
  const StripScratch scratch(job.plan->room, memory);
  if (group != packed && !pack_group(job, group, scratch.weights)) finite = false;
  packed = group;
  copy_sources(*job.plan, job.source, group, strip, scratch);
  const float* weights = scratch.weights;
  const int64_t* offsets = job.plan->offsets.data();
  for (const StripWay& way : strips.ways) {
    const int64_t depth = strips.depth(way);
    const int64_t lines = target_lines(*job.plan, job.target.layout, way.phase, strip, scratch.lines);
    for (int64_t first = 0; first < strips.targets; first += cut.targets) {
      const int64_t planes = smaller(cut.targets, strips.targets - first);
      for (int64_t plane = 0; plane < planes; plane += kStripTargets) {
        const int64_t targets = smaller(kStripTargets, planes - plane);
        float* sums = scratch.targets + plane * cut.target_floats;
        with_targets(targets, [&](auto count) __attribute__((always_inline)) {
          constexpr int kBlocks = tile_blocks(count.value), kLast = kBlocks > 1 ? kBlocks / 2 : 1;
          int64_t at = 0;
          for (; at + kLast * kLanes < end; at += kBlocks * kLanes)
            sum_tile<count.value, kBlocks>(scratch.sources + at, offsets, depth, weights, sums + at, cut.target_floats);
          for (; at < end; at += kLast * kLanes)
            sum_tile<count.value, kLast>(scratch.sources + at, offsets, depth, weights, sums + at, cut.target_floats);
        });
        weights += targets * depth;
      }
      finish_strip(job, group * strips.targets + first, planes, scratch.lines, lines, scratch.targets);
    }
    offsets += depth;
  }
}

inline void strips_forward(const StripSums& job, const StripMemory& memory, Worker& worker, std::atomic<bool>& finite) {
  float* own = memory.data + worker.index() * memory.each;
  int64_t packed = -1;
  worker.phase({job.plan->strips.groups * job.plan->cut.count},
               [&](int64_t item) { sum_strip(job, item, packed, own, finite); });
}

// dw of kTargets channels by the tile's channels and taps, over a strip.
template <int kTargets>
WNFUSED_INLINE void gradient_tile(const float* source, const int64_t* offsets, const float* dz, int64_t dz_stride,
                                  int64_t span, float* dw, int64_t dw_stride) {
  constexpr int kTileTaps = tile_taps(kTargets);
  Block sum[kTargets][kTileTaps];
  WNFUSED_UNROLL for (int t = 0; t < kTargets; ++t)
    WNFUSED_UNROLL for (int k = 0; k < kTileTaps; ++k) sum[t][k] = zero();
  const float* at[kTileTaps];
  WNFUSED_UNROLL for (int k = 0; k < kTileTaps; ++k) at[k] = source + offsets[k];
  for (int64_t i = 0; i < span; i += kLanes) {
    Block gradient[kTargets];
    WNFUSED_UNROLL for (int t = 0; t < kTargets; ++t) gradient[t] = load(dz + t * dz_stride + i);
    WNFUSED_UNROLL for (int k = 0; k < kTileTaps; ++k) {
      const Block entry = load(at[k] + i);
      WNFUSED_UNROLL for (int t = 0; t < kTargets; ++t) sum[t][k] = multiply_add(gradient[t], entry, sum[t][k]);
    }
  }
  constexpr int kSums = kTargets * kTileTaps, kRounds = divide_up(kSums, kLanes);
  float totals[kRounds * kLanes];
  WNFUSED_UNROLL for (int round = 0; round < kRounds; ++round) {
    Block part[kLanes];
    WNFUSED_UNROLL for (int i = 0; i < kLanes; ++i) {
      const int n = round * kLanes + i;
      part[i] = n < kSums ? sum[n / kTileTaps % kTargets][n % kTileTaps] : zero();
    }
    store(totals + round * kLanes, sums_of(part));
  }
  for (int t = 0; t < kTargets; ++t)
    for (int k = 0; k < kTileTaps; ++k) dw[t * dw_stride + k] += totals[t * kTileTaps + k];
}

// A slice's strips of one group.
inline void gradient_slice(const StripGradient& job, int64_t group, int64_t slice, float* memory) {
  const Strips& strips = job.plan->strips;
  const StripCut& cut = job.plan->cut;
  const StripScratch scratch(job.plan->room, memory);
  float* dw = job.dw + (slice * strips.groups + group) * strips.targets * job.depth;
  __builtin_memset(dw, 0, strips.targets * job.depth * sizeof(float));
  for (int64_t strip = cut.count * slice / job.slices; strip < cut.count * (slice + 1) / job.slices; ++strip) {
    copy_sources(*job.plan, job.x, group, strip, scratch);
    const int64_t lines = target_lines(*job.plan, job.dz.layout, {0, 0}, strip, scratch.lines);
    for (int64_t first = 0; first < strips.targets; first += cut.targets) {
      const int64_t planes = smaller(cut.targets, strips.targets - first);
      copy_channels(job.dz, group * strips.targets + first, planes, scratch.lines, lines, 1, scratch.targets,
                    cut.target_floats);
      for (int64_t plane = 0; plane < planes; plane += kStripTargets)
        with_targets(smaller(kStripTargets, planes - plane), [&](auto count) __attribute__((always_inline)) {
          float* rows = dw + (first + plane) * job.depth;
          for (int64_t k = 0; k < job.depth; k += tile_taps(count.value))
            gradient_tile<count.value>(scratch.sources, job.plan->offsets.data() + k,
                                       scratch.targets + plane * cut.target_floats, cut.target_floats, cut.span,
                                       rows + k, job.depth);
        });
    }
  }
}

// dv and dg of one row, from dw of all slices; dv = dw where there is no g. Whether dw is finite.
inline bool finish_gradient_row(const StripGradient& job, int64_t row) {
  const Strips& strips = job.plan->strips;
  const int64_t length = strips.sources * strips.channel_taps, rows = strips.targets * strips.groups;
  float* dw = job.dw + row * job.depth;
  Block poison = zero();
  for_blocks(length, [&](int64_t i, auto move) __attribute__((always_inline)) {
    Block sum = move.load(dw + i);
    for (int64_t slice = 1; slice < job.slices; ++slice) sum = sum + move.load(dw + slice * rows * job.depth + i);
    poison = multiply_add(sum, zero(), poison);
    move.store(dw + i, sum);
  });
  float* dv = job.dv + row * length;
  if (job.gain) job.dgain[row] = gradient_row(dw, job.v + row * length, dv, length, job.gain[row], job.norm[row]);
  else __builtin_memcpy(dv, dw, length * sizeof(float));
  return sum_of(poison) == 0;
}

inline void strips_backward(const StripSums& sums, const StripGradient& gradient, const StripMemory& memory,
                            Worker& worker, std::atomic<bool>& finite) {
  const Strips& layer = gradient.plan->strips;
  const int64_t strips = sums.target.data ? sums.plan->cut.count * layer.groups : 0;
  const int64_t slices = gradient.dv ? gradient.slices * layer.groups : 0;
  float* own = memory.data + worker.index() * memory.each;
  int64_t packed = -1;
  worker.phase({strips, slices}, [&](int64_t item) {
    if (item < strips) return sum_strip(sums, item, packed, own, finite);
    packed = -1;  // its memory is used
    item -= strips;
    gradient_slice(gradient, item / gradient.slices, item % gradient.slices, own);
  });
  if (!gradient.dv) return;
  worker.phase({layer.targets * layer.groups}, [&](int64_t row) {
    if (!finish_gradient_row(gradient, row)) finite = false;
  });
}

}  // namespace wnfused::cpu::WNFUSED_ISA

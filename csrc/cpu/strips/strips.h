// A direct convolution whose lanes are pixels: for first and last layers and for groups of few channels. The other
// kernels' lanes are channels, and most of them would be empty.
//
//              sums over                       copies
//   forward    y  = w x    inputs, taps        x
//   dx         dx = w dz   outputs, taps       dz
//   dw         dw = dz x   pixels              x, dz         then dv and dg
//
// One Strips describes the way from the map that is read (`source`) to the one that is written (`target`). The target's
// pixels are numbered through all images, with places between them that are no pixels of it:
//
//      a b c d . | e f g h . | . . . . . | next image      2 x 4 pixels, 3x3 taps, padding 1: pitches of 5 and 3
//
// In the source these places are padding, as many as the taps reach, before a line and after the one before. So each
// tap is one distance from any pixel, and 16 places are a Block that begins anywhere. An item takes a strip of places,
// copies what its taps reach of each channel, with the padding, and sums over channels and taps in registers, for up to
// kStripTargets channels of the target at once. Channels of maps in channels_last are turned into planes as they are
// copied, and sums back again, 16 of them at a time.
//
// With a stride, pixels that have the same remainder, the phase, move in equal steps: of the source each phase is a
// plane, and there is a way to each phase of the target, with some of the taps.
//
// Floor, forward: 2 places x inputs x outputs x taps FLOPs, places being pixels and those between them; 4 bytes for
// each number of x and y, and, in the caches, 8 (span + reach) / span for each of x that is copied. The order of sums
// depends on the layer, the layouts and the instruction set, never on the number of threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "cpu/layer/layer.h"
#include "cpu/machine/work_queue.h"
#include "cpu/window/window.h"

namespace wnfused::cpu {

constexpr int64_t kStripTargets = 4;
constexpr int64_t kFewTurned = 6;     // up to so many channels of a channels_last map are copied one by one
constexpr int64_t kGradientTaps = 6;  // of all channels: what a row of dw is padded to in whole

// One dim of a map: every stride-th pixel from a phase on takes part.
struct StripAxis {
  int64_t pixels, stride;

  int64_t count(int64_t phase) const { return divide_up(pixels - phase, stride); }
};

struct StripPhase {
  int64_t row, column;
};

// plane: of a channel of the source. weight: which of a channel's in a row of v.
struct StripTap {
  int64_t plane, distance, weight;
};

struct StripWay {
  StripPhase phase;  // of the target
  std::vector<StripTap> taps;
};

struct Strips {
  int64_t images, groups, sources, targets;  // channels of a group
  int64_t channel_taps;                      // of a channel in a row of v
  bool taps_first;                           // rows of v are [tap][channel] instead of [channel][tap]
  StripAxis source_rows, source_columns, target_rows, target_columns;
  int64_t pitch, image_lines;      // places of a line, lines of an image
  std::vector<StripPhase> planes;  // of a channel of the source
  std::vector<StripWay> ways;
  int64_t low, high;  // the smallest and the largest distance

  int64_t source_planes() const { return sources * static_cast<int64_t>(planes.size()); }
  int64_t depth(const StripWay& way) const { return sources * static_cast<int64_t>(way.taps.size()); }
  int64_t places() const {
    return ((images - 1) * image_lines + target_rows.count(0) - 1) * pitch + target_columns.count(0);
  }
};

// The way from x to y, and those back from dz to dx.
Strips strips_of(const ConvShape& shape, bool taps_first);
Strips strips_back(const ConvShape& shape, bool taps_first);

// Places to each pixel of y: those between its lines and images are summed in vain.
double places_each(const ConvShape& shape);

// Strips of `span` places, the last one perhaps of fewer; how far apart the planes of the source are, and those of the
// target or its sums, of which there are `targets`.
struct StripCut {
  int64_t span, count, source_floats, target_floats, targets;
};

StripCut cut_strips(const Strips& strips, int64_t span, int64_t targets);

// Where a line's part of a strip is: `places` of the strip after `done` others, the first `pixels` of which are a
// channel's from `at` on; the others are none. Lines that follow each other in memory without such are one.
struct StripLine {
  int64_t done, places, at, pixels;
};

// A worker's memory, in floats from its beginning: planes of the source, then those of the target or its sums, a
// group's weights, lines.
struct StripRoom {
  int64_t targets, weights, lines, size;
};

StripRoom strip_room(const Strips& strips, const StripCut& cut);

// A map in memory: floats from one channel, pixel and image to the next.
struct StripLayout {
  int64_t channel, pixel, image;

  bool has_pixels_apart() const { return pixel > 1; }
};

// One that is read, and one that is written: none of it where data is null.
struct StripSource {
  StripLayout layout;
  const float* data;
};
struct StripTarget {
  StripLayout layout;
  float* data;
};

// Where each channel and tap of all ways reads, from a strip's first place on.
std::vector<int64_t> strip_offsets(const Strips& strips, const StripCut& cut);

// A way through a map, and what its strips need.
struct StripPlan {
  Strips strips;
  StripCut cut;
  StripRoom room;
  std::vector<int64_t> offsets;
};

// A sum over channels and taps. Weights: rows of v times scale, of the target's channels or, with `back`, the source's.
struct StripSums {
  const StripPlan* plan;
  bool back;
  const float *v, *scale;
  StripSource source;
  StripTarget target;
  const float *bias, *residual;  // may be null; the residual lies as the target does
  Activation activation;
  float slope;
};

// A sum over pixels, of dz, its target, and x. slices: of strips, whose sums are added up at the end.
struct StripGradient {
  const StripPlan* plan;
  StripSource x, dz;
  const float *v, *gain, *norm;  // gain null: dv is dw
  float *dv, *dgain;      // dv null: nothing of it
  int64_t slices, depth;  // depth: entries of a row of dw, padded; so many offsets, too
  float* dw;              // [slices][rows][depth]
};

// The memory of all workers, so many floats each.
struct StripMemory {
  float* data;
  int64_t each;
};

struct StripKernels {
  int64_t unit;  // places that a strip should be a multiple of
  // `finite` becomes false where a weight or dw is not: then padding would count.
  void (*forward)(const StripSums&, const StripMemory&, Worker&, std::atomic<bool>& finite);
  void (*backward)(const StripSums&, const StripGradient&, const StripMemory&, Worker&, std::atomic<bool>& finite);
};

namespace avx512 {
extern const StripKernels strip_kernels;
}
namespace avx2 {
extern const StripKernels strip_kernels;
}

// Those of the instruction set in use; null where the vendor's convolutions do better.
const StripKernels* strip_kernels();

}  // namespace wnfused::cpu

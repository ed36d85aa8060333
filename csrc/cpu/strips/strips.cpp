// How a layer's maps are numbered, and where its taps are (strips.h).
#include "cpu/strips/strips.h"

#include <algorithm>

#include "cpu/machine/workspace.h"
#include "cpu/vec/lanes.h"

namespace wnfused::cpu {
namespace {

int64_t floor_divide(int64_t a, int64_t b) { return (a >= 0 ? a : a - b + 1) / b; }

// One dim of a tap: which phase of the source it meets, and how many steps from a target pixel's own place.
struct AxisTap {
  int64_t index, phase, step;
};

// From one line, or image, to the next: pixels before the first and after the last one share their places with the
// line, or the image, beside it. low, high: the steps that taps reach, 0 among them.
int64_t pitch_of(const StripAxis& source, const StripAxis& target, int64_t low, int64_t high) {
  return std::max(target.count(0) + high, source.count(0) - low);
}

// One dim of the ways: the taps to each phase of the target.
struct Axis {
  StripAxis source, target;
  std::vector<std::vector<AxisTap>> taps;

  int64_t pitch() const {
    int64_t low = 0, high = 0;
    for (const auto& phase : taps)
      for (const AxisTap& tap : phase) {
        low = std::min(low, tap.step);
        high = std::max(high, tap.step);
      }
    return pitch_of(source, target, low, high);
  }
};

Axis axis_of(const ConvShape& shape, int64_t Triple::*at) {
  const int64_t stride = shape.stride.*at;
  Axis axis{{shape.size.*at, stride}, {shape.output_size().*at, 1}, {{}}};
  for (int64_t k = 0; k < shape.kernel.*at; ++k) {
    const int64_t place = k * (shape.dilation.*at) - shape.padding.*at, step = floor_divide(place, stride);
    axis.taps[0].push_back({k, place - step * stride, step});
  }
  return axis;
}

Axis axis_back(const ConvShape& shape, int64_t Triple::*at) {
  const int64_t stride = shape.stride.*at, phases = std::min(stride, shape.size.*at);
  Axis axis{{shape.output_size().*at, 1}, {shape.size.*at, stride}, {}};
  axis.taps.resize(phases);
  for (int64_t k = 0; k < shape.kernel.*at; ++k)
    for (int64_t phase = 0; phase < phases; ++phase) {
      const int64_t place = phase + shape.padding.*at - k * (shape.dilation.*at), step = floor_divide(place, stride);
      if (step * stride == place) axis.taps[phase].push_back({k, 0, step});
    }
  return axis;
}

// The number of a plane, which is added where there is none.
int64_t plane_of(std::vector<StripPhase>& planes, const StripPhase& phase) {
  const auto same = [&](const StripPhase& plane) { return plane.row == phase.row && plane.column == phase.column; };
  const auto found = std::find_if(planes.begin(), planes.end(), same);
  const int64_t number = found - planes.begin();
  if (found == planes.end()) planes.push_back(phase);
  return number;
}

Strips strips_along(const ConvShape& shape, bool taps_first, int64_t sources, int64_t targets, const Axis& rows,
                    const Axis& columns) {
  Strips strips{shape.images, shape.groups, sources / shape.groups, targets / shape.groups, shape.taps(), taps_first,
                rows.source, columns.source, rows.target, columns.target, columns.pitch(), rows.pitch(), {}, {}, 0, 0};
  bool first = true;
  for (size_t r = 0; r < rows.taps.size(); ++r)
    for (size_t c = 0; c < columns.taps.size(); ++c) {
      StripWay way{{static_cast<int64_t>(r), static_cast<int64_t>(c)}, {}};
      for (const AxisTap& row : rows.taps[r])
        for (const AxisTap& column : columns.taps[c]) {
          const int64_t distance = row.step * strips.pitch + column.step;
          strips.low = first ? distance : std::min(strips.low, distance);
          strips.high = first ? distance : std::max(strips.high, distance);
          first = false;
          way.taps.push_back({plane_of(strips.planes, {row.phase, column.phase}), distance,
                              row.index * shape.kernel.column + column.index});
        }
      strips.ways.push_back(way);
    }
  return strips;
}

}  // namespace

Strips strips_of(const ConvShape& shape, bool taps_first) {
  const Axis rows = axis_of(shape, &Triple::row), columns = axis_of(shape, &Triple::column);
  return strips_along(shape, taps_first, shape.inputs, shape.outputs, rows, columns);
}

Strips strips_back(const ConvShape& shape, bool taps_first) {
  const Axis rows = axis_back(shape, &Triple::row), columns = axis_back(shape, &Triple::column);
  return strips_along(shape, taps_first, shape.outputs, shape.inputs, rows, columns);
}

double places_each(const ConvShape& shape) {
  const Triple output = shape.output_size();
  const auto pitch = [&](int64_t Triple::*at) {
    const int64_t stride = shape.stride.*at, first = -(shape.padding.*at);
    const int64_t last = first + shape.dilation.*at * (shape.kernel.*at - 1);
    return pitch_of({shape.size.*at, stride}, {output.*at, 1}, std::min<int64_t>(floor_divide(first, stride), 0),
                    std::max<int64_t>(floor_divide(last, stride), 0));
  };
  // All but what comes after the last pixel.
  const int64_t lines = (shape.images - 1) * pitch(&Triple::row) + output.row - 1;
  const int64_t places = lines * pitch(&Triple::column) + output.column;
  return static_cast<double>(places) / static_cast<double>(shape.images * output.product());
}

StripCut cut_strips(const Strips& strips, int64_t span, int64_t targets) {
  // Copies end with whole blocks, beyond the last place. Powers of two would put all planes into one set of a cache.
  const auto apart = [](int64_t floats) { return floats % 256 == 0 ? floats + kLanes : floats; };
  const int64_t reach = round_up(span + strips.high - strips.low, kLanes);
  return {span, divide_up(strips.places(), span), apart(reach + 2 * kLanes), apart(span + kLanes), targets};
}

StripRoom strip_room(const Strips& strips, const StripCut& cut) {
  const int64_t lines = (cut.span + strips.high - strips.low) / strips.pitch + 2;
  StripRoom room{};
  room.targets = strips.source_planes() * cut.source_floats;
  room.weights = room.targets + cut.targets * cut.target_floats;
  room.lines = room.weights + round_up(strips.targets * strips.sources * strips.channel_taps, kLanes);
  room.size = room.lines + round_up(lines * static_cast<int64_t>(sizeof(StripLine) / sizeof(float)), kLanes) + kApart;
  return room;
}

std::vector<int64_t> strip_offsets(const Strips& strips, const StripCut& cut) {
  std::vector<int64_t> offsets;
  const int64_t planes = static_cast<int64_t>(strips.planes.size());
  const auto add = [&](int64_t source, const StripTap& tap) {
    offsets.push_back((source * planes + tap.plane) * cut.source_floats + tap.distance - strips.low);
  };
  for (const StripWay& way : strips.ways) {
    if (strips.taps_first)
      for (const StripTap& tap : way.taps)
        for (int64_t source = 0; source < strips.sources; ++source) add(source, tap);
    else
      for (int64_t source = 0; source < strips.sources; ++source)
        for (const StripTap& tap : way.taps) add(source, tap);
  }
  return offsets;
}

}  // namespace wnfused::cpu

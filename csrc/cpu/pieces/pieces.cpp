#include "cpu/pieces/pieces.h"

#include <algorithm>
#include <numeric>

namespace wnfused::cpu {
namespace {

constexpr Triple kOnes{1, 1, 1};

// The same layer with the rows of its map end to end in one line, and levels as rows. The kernel has one column, and no
// stride.
ConvShape laid_end_to_end(const ConvShape& shape) {
  const int64_t width = shape.size.column;
  const auto moved = [](const Triple& at, int64_t level, int64_t factor) {
    return Triple{level, at.level, at.row * factor};
  };
  ConvShape line = shape;
  line.size = moved(shape.size, 1, width);
  line.kernel = moved(shape.kernel, 1, 1);
  line.padding = moved(shape.padding, 0, width);
  line.dilation = moved(shape.dilation, 1, width);
  return line;
}

// As a sum of convolutions along lines, without a stride.
ConvShape along_lines(ConvShape shape) {
  for (int i = 0; i < 2 && shape.kernel.column == 1 && shape.padding.column == 0; ++i) shape = laid_end_to_end(shape);
  return shape;
}

// How a row of the kernel and a line of the map are cut.
struct LineCut {
  int64_t piece_taps, pieces, phases, tiles, pitch;
};

LineCut cut_of(int64_t taps, int64_t width, int64_t dilation) {
  LineCut cut{};
  cut.piece_taps = taps == 3 || taps == 5 ? taps : 4;
  cut.pieces = divide_up(taps, cut.piece_taps);
  cut.phases = std::min(width, dilation);
  cut.tiles = divide_up(divide_up(width, cut.phases), kPieceOutputs);
  cut.pitch = cut.tiles + cut.pieces - 1;
  return cut;
}

// Whether every output block, and in the data gradient every block of inputs, sums over whole blocks of channels.
bool sums_over_blocks(const ConvShape& shape) {
  const int64_t inputs = shape.inputs / shape.groups, outputs = shape.outputs / shape.groups;
  const auto whole = [](int64_t from, int64_t to) { return from * (kLanes / std::gcd(to, kLanes)) % kLanes == 0; };
  return whole(inputs, outputs) && whole(outputs, inputs);
}

// Whether these kernels take a layer along lines: sums over whole blocks, and no output that lies wholly in the
// padding, since what is exactly 0 there, and has no gradient behind a ReLU, would be rounded.
bool has_pieces(const ConvShape& shape) {
  const auto reaches_map = [&](int64_t Triple::*at) {
    const int64_t kernel = shape.kernel.*at, dilation = shape.dilation.*at;
    return shape.padding.*at <= dilation * (kernel - 1) && (kernel == 1 || dilation <= shape.size.*at);
  };
  return (shape.groups == 1 || sums_over_blocks(shape)) && shape.kernel.column >= 3 && reaches_map(&Triple::level) &&
         reaches_map(&Triple::row) && reaches_map(&Triple::column) && !shape.has_thin_input();
}

// The rows of a panel: as many as leave the panels and their product in the second-level cache.
int64_t rows_that_stay(const Pieces& geometry) {
  constexpr int64_t kFloats = 1 << 17;
  const int64_t row =
      geometry.planes * (geometry.line_taps * geometry.source.padded_channels + geometry.padded_outputs);
  int64_t rows = kMaxPanelRows;
  while (rows > kLanes && rows * row > kFloats) rows /= 2;
  return rows;
}

}  // namespace

bool suits_pieces(const ConvShape& given) {
  if (!(given.stride == kOnes)) return false;
  const ConvShape shape = along_lines(given);
  if (!has_pieces(shape)) return false;
  // Rows of C^2 multiply-adds, and what a plane of the bank costs to pack and to finish as if it were rows more: there
  // must be a tenth less, for the transforms. A sum over taps position by position leaves out those that meet no pixel;
  // others multiply by zeros.
  constexpr int64_t kPack = 6;
  const Triple size = shape.output_size();
  const LineCut cut = cut_of(shape.kernel.column, size.column, shape.dilation.column);
  const int64_t lines = shape.images * size.level * size.row, line_taps = shape.kernel.level * shape.kernel.row;
  const int64_t planes = line_taps * (cut.piece_taps + kPieceOutputs - 1) * cut.pieces;
  const int64_t pixels = lines * size.column * shape.taps(), met = shape.images * shape.met_taps();
  const bool by_position = goes_by_position(shape, size);
  // A panel of few rows takes longer for each of them.
  constexpr int64_t kFewRows = 4;
  const int64_t direct = (!by_position ? pixels : shape.images < kFewRows ? met * 4 / 3 : met) + kPack * shape.taps();
  return planes * (lines * cut.phases * cut.pitch + kPack) * 10 < direct * 9;
}

Pieces make_pieces(const ConvShape& given, bool back, int64_t workers) {
  const ConvShape shape = along_lines(given);
  Pieces geometry{};
  geometry.direct = back ? backward_window(shape, workers) : forward_window(shape, false, workers);
  geometry.source = geometry.direct.source;
  geometry.target = geometry.direct.target;
  geometry.source_size = geometry.direct.source_size;
  geometry.target_size = geometry.direct.target_size;
  geometry.kernel = shape.kernel;
  geometry.dilation = shape.dilation;
  const auto first = [&](int64_t Triple::*at) {
    const int64_t padding = shape.padding.*at;
    return back ? padding - shape.dilation.*at * (shape.kernel.*at - 1) : -padding;
  };
  geometry.first = {first(&Triple::level), first(&Triple::row), first(&Triple::column)};
  geometry.turned = back;
  const LineCut cut = cut_of(shape.kernel.column, geometry.target.width, shape.dilation.column);
  geometry.piece_taps = cut.piece_taps;
  geometry.planes = cut.piece_taps + kPieceOutputs - 1;
  geometry.pieces = cut.pieces;
  geometry.line_taps = shape.kernel.level * shape.kernel.row;
  geometry.phases = cut.phases;
  geometry.tiles = cut.tiles;
  geometry.pitch = cut.pitch;
  geometry.units = geometry.target.images * geometry.target.height * geometry.phases * geometry.pitch;
  geometry.output_blocks = geometry.target.channel_blocks;
  geometry.padded_outputs = geometry.target.padded_channels;
  geometry.group_blocks = geometry.direct.group_blocks;
  geometry.depth = geometry.direct.depth;
  geometry.plane_stride = geometry.output_blocks * geometry.block_floats() + kLanes;
  geometry.direct.plane_stride = geometry.block_floats() + kLanes;

  constexpr int64_t kStay = 2, kStayingRows = 32;
  const int64_t most = rows_that_stay(geometry);
  const Work work{geometry.output_blocks,   geometry.bank_size(), geometry.source.map_size(),
                  geometry.gradient_size(), most,                 std::min(most, kStayingRows),
                  workers,                  kStay};
  divide_convolution(work, [&](int64_t rows) { return divide_up(geometry.units, rows); }, geometry);
  divide_gradient(work, geometry.units, 2 * kLanes * geometry.depth_blocks(), geometry);
  geometry.sums_stride = geometry.wgrad_bundle_blocks * geometry.block_floats() + kLanes;
  geometry.direct.wgrad_slices = geometry.wgrad_slices;
  return geometry;
}

int64_t worker_floats(const Pieces& geometry) {
  const auto panels = [&](int64_t count, int64_t rows, int64_t blocks) {
    const int64_t sources = geometry.panel_rows(rows) * geometry.source.channel_blocks;
    return geometry.planes * (count * (sources + 1) + rows * blocks + 1) * kLanes;
  };
  const int64_t conv = panels(geometry.line_taps, geometry.conv_rows, geometry.conv_bundle_blocks);
  const int64_t wgrad = panels(1, geometry.wgrad_rows, geometry.wgrad_bundle_blocks) +
                        geometry.line_taps * geometry.line_planes() * geometry.sums_stride;
  const int64_t finish = kFinishRows * divide_up(geometry.direct.planes * geometry.direct.depth, kLanes) * kLanes;
  return std::max({conv, wgrad, geometry.direct_floats(), finish});
}

int64_t zeros_floats(const Pieces& geometry) {
  return std::max(geometry.source.padded_channels, geometry.padded_outputs);
}

}  // namespace wnfused::cpu

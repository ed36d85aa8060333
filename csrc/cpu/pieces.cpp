#include "pieces.h"

#include <algorithm>

namespace wnfused::cpu {
namespace {

// Tiles of a phase, and phases of a line, of so many pixels.
struct Tiling {
  int64_t phases, tiles;
};

Tiling tiling_of(int64_t width, int64_t dilation) {
  const int64_t phases = std::min(width, dilation);
  return {phases, divide_up(divide_up(width, phases), kPieceOutputs)};
}

// The rows of a panel: as many as leave it and its product in the second-level cache.
int64_t rows_that_stay(const Pieces& geometry) {
  constexpr int64_t kFloats = 1 << 17;
  const int64_t row = kPiecePlanes * (geometry.source.padded_channels + geometry.padded_outputs);
  int64_t rows = kMaxPanelRows;
  while (rows > kLanes && rows * row > kFloats) rows /= 2;
  return rows;
}

}  // namespace

bool has_pieces(const ConvShape& shape) {
  const auto is_point = [&](int64_t Triple::*at) {
    return shape.kernel.*at == 1 && shape.stride.*at == 1 && shape.padding.*at == 0;
  };
  const int64_t taps = shape.kernel.column, dilation = shape.dilation.column;
  return shape.groups == 1 && is_point(&Triple::level) && is_point(&Triple::row) && shape.stride.column == 1 &&
         taps >= 3 && shape.padding.column <= dilation * (taps - 1) && dilation <= shape.size.column &&
         !shape.has_thin_input();
}

bool suits_pieces(const ConvShape& shape) {
  // Multiply-adds in units of C^2; what a plane of the bank costs to pack and to finish as if it were rows more.
  constexpr int64_t kPack = 6;
  const int64_t taps = shape.kernel.column, pieces = divide_up(taps, kPieceTaps);
  const Triple size = shape.output_size();
  const int64_t lines = shape.images * size.level * size.row;
  const Tiling tiling = tiling_of(size.column, shape.dilation.column);
  const int64_t units = lines * tiling.phases * (tiling.tiles + pieces - 1);
  return kPiecePlanes * pieces * (units + kPack) * 10 < taps * (lines * size.column + kPack) * 9;
}

Pieces make_pieces(const ConvShape& shape, bool back, int64_t workers) {
  Pieces geometry{};
  geometry.direct = back ? backward_window(shape, workers) : forward_window(shape, false, workers);
  geometry.source = geometry.direct.source;
  geometry.target = geometry.direct.target;
  geometry.taps = shape.kernel.column;
  geometry.pieces = divide_up(geometry.taps, kPieceTaps);
  geometry.turned = back;
  geometry.dilation = shape.dilation.column;
  geometry.first = back ? shape.padding.column - geometry.dilation * (geometry.taps - 1) : -shape.padding.column;
  const Tiling tiling = tiling_of(geometry.target.width, geometry.dilation);
  geometry.phases = tiling.phases;
  geometry.tiles = tiling.tiles;
  geometry.pitch = geometry.tiles + geometry.pieces - 1;
  geometry.units = geometry.target.images * geometry.target.height * geometry.phases * geometry.pitch;
  geometry.output_blocks = geometry.target.channel_blocks;
  geometry.padded_outputs = geometry.target.padded_channels;
  geometry.plane_stride = geometry.source.padded_channels * geometry.padded_outputs + kLanes;
  geometry.direct.plane_stride = geometry.block_floats() + kLanes;

  constexpr int64_t kStay = 6;
  const int64_t rows = rows_that_stay(geometry);
  const Work work{geometry.output_blocks, geometry.bank_size(), geometry.source.map_size(), rows, 16, workers, kStay};
  divide_convolution(work, [&](int64_t rows) { return divide_up(geometry.units, rows); }, geometry);
  divide_gradient(work, geometry.units, 2 * geometry.source.padded_channels, geometry);
  geometry.sums_stride = geometry.wgrad_group_blocks * geometry.block_floats() + kLanes;
  geometry.direct.wgrad_slices = geometry.wgrad_slices;
  return geometry;
}

}  // namespace wnfused::cpu

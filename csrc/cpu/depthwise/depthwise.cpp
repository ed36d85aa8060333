#include "cpu/depthwise/depthwise.h"

#include <algorithm>
#include <utility>

namespace wnfused::cpu {
namespace {

Span part_of(int64_t size, int64_t parts, int64_t index) {
  return {size * index / parts, size * (index + 1) / parts};
}

Span reached(const Span& span, int64_t source_step, int64_t target_step, int64_t first, int64_t last) {
  if (span.count() == 0) return {0, 0};
  return {span.begin / target_step * source_step + first, (span.end - 1) / target_step * source_step + last + 1};
}

Span joined(const Span& a, const Span& b) {
  if (a.count() == 0 || b.count() == 0) return a.count() ? a : b;
  return {std::min(a.begin, b.begin), std::max(a.end, b.end)};
}

Triple reach_of(const ConvShape& shape) {
  return {0, shape.dilation.row * (shape.kernel.row - 1), shape.dilation.column * (shape.kernel.column - 1)};
}

// The largest tile of a layer, both of whose maps are cut alike, and how many blocks of channels are taken at once.
struct TileSize {
  Triple map, tile;
  int64_t blocks;
};

TileSize tile_size(const ConvShape& shape) {
  // A copy of so many pixels and blocks stays in a second-level cache, and a tile of so many pixels costs no more than
  // it must. What a tile reads around itself is at most as large, along a row a quarter. Blocks beside each other are
  // lines of memory beside each other, which a processor fetches ahead.
  constexpr int64_t kCopy = 4096, kTilePixels = 512, kRowPixels = 128;
  const Triple size = shape.output_size(), reach = reach_of(shape);
  const Triple map{1, std::max(size.row, shape.size.row), std::max(size.column, shape.size.column)};
  const int64_t blocks = divide_up(shape.inputs, kLanes);
  const int64_t columns = std::min(map.column, std::max(kRowPixels, 4 * reach.column));
  const int64_t pixels = std::max(kTilePixels, kCopy / blocks);
  const int64_t rows = std::min(
      map.row, std::max(pixels / (columns + reach.column) - reach.row, std::max<int64_t>(reach.row, 1)));
  const int64_t held = (rows + reach.row) * (columns + reach.column);
  return {map, {1, rows, columns}, std::clamp<int64_t>(kCopy / held, 1, blocks)};
}

void divide(const ConvShape& shape, int64_t pieces, Depthwise& layer) {
  constexpr int64_t kLeastPixels = 64, kLeastBlocks = 4;  // of an item
  const auto [map, tile, at_once] = tile_size(shape);
  const int64_t blocks = layer.output_blocks;
  Triple& tiles = layer.tiles;
  tiles = {1, divide_up(map.row, tile.row), divide_up(map.column, tile.column)};
  int64_t groups = divide_up(blocks, at_once);
  const int64_t pixels = map.product();
  const auto few = [&] { return shape.images * groups * tiles.product() < pieces; };
  const auto large = [&] { return pixels >= 2 * kLeastPixels * tiles.product(); };
  while (few() && blocks > kLeastBlocks * groups) ++groups;
  while (few() && large() && tiles.row < map.row) ++tiles.row;
  while (few() && large() && tiles.column < map.column) ++tiles.column;
  while (few() && groups < blocks) ++groups;
  layer.blocks_at_once = divide_up(blocks, groups);
  layer.bundles = divide_up(blocks, layer.blocks_at_once);
  layer.wgrad_slices = std::clamp<int64_t>(divide_up(pieces, layer.bundles), 1, layer.tile_count());
}

}  // namespace

Region Depthwise::tile(const MapShape& map, int64_t index) const {
  index %= tiles.product();
  return {part_of(map.height, tiles.row, index / tiles.column),
          part_of(map.width, tiles.column, index % tiles.column)};
}

Region Depthwise::reach(const Region& region) const {
  if (region.pixels() == 0) return {};
  const Span rows = reached(region.rows, source_step.row, target_step.row, first_tap.row, last_tap.row);
  const int64_t begin = std::clamp<int64_t>(rows.begin, 0, source.height);
  return {{begin, std::clamp(rows.end, begin, source.height)},
          reached(region.columns, source_step.column, target_step.column, first_tap.column, last_tap.column)};
}

int64_t forward_shares(int64_t workers) { return workers > 1 ? 4 * workers : 1; }

int64_t backward_shares(const ConvShape& shape) {
  // Vectors of products that a piece has at least; a slice's sums are few.
  constexpr int64_t kWork = 1 << 14, kMostPieces = 64;
  const int64_t work =
      shape.images * shape.output_size().product() * shape.taps() * divide_up(shape.inputs, kLanes);
  return std::clamp<int64_t>(work / kWork, 1, kMostPieces);
}

bool has_small_tiles(const ConvShape& shape) {
  // Pixels and blocks: 32 MB.
  constexpr int64_t kMost = 1 << 19;
  const TileSize size = tile_size(shape);
  const Triple reach = reach_of(shape);
  // Tiles of y and of dx lie as far apart as the padding moves them.
  const Triple held{1, size.tile.row + 2 * (reach.row + shape.padding.row),
                  size.tile.column + 2 * (reach.column + shape.padding.column)};
  return held.row <= kMost && held.column <= kMost && held.product() <= kMost / size.blocks;
}

Depthwise make_depthwise(const ConvShape& shape, bool back, int64_t pieces) {
  Depthwise layer{};
  static_cast<Window&>(layer) = back ? backward_window(shape, 1) : forward_window(shape, false, 1);
  const Tap *first = layer.taps, *last = first + layer.planes;
  const auto reach = [&](int64_t Tap::*at) {
    return std::minmax_element(first, last, [at](const Tap& a, const Tap& b) { return a.*at < b.*at; });
  };
  const auto rows = reach(&Tap::row), columns = reach(&Tap::column);
  layer.first_tap = {0, rows.first->row, columns.first->column};
  layer.last_tap = {0, rows.second->row, columns.second->column};
  divide(shape, pieces, layer);
  return layer;
}

Region gradient_region(const Depthwise& forward, const Depthwise& back, int64_t index) {
  const Region own = forward.tile(forward.target, index), around = back.reach(back.tile(back.target, index));
  if (around.pixels() == 0 || own.pixels() == 0) return own.pixels() ? own : around;
  return {joined(own.rows, around.rows), joined(own.columns, around.columns)};
}

DepthwiseRoom forward_room(const Depthwise& forward) {
  DepthwiseRoom room{};
  for (int64_t i = 0; i < forward.tiles.product(); ++i) {
    const Region own = forward.tile(forward.target, i);
    room.x = std::max(room.x, forward.reach(own).pixels());
    room.y = std::max(room.y, own.pixels());
  }
  return room;
}

DepthwiseRoom backward_room(const Depthwise& forward, const Depthwise& back) {
  DepthwiseRoom room = forward_room(forward);
  for (int64_t i = 0; i < forward.tiles.product(); ++i) {
    room.y = std::max(room.y, gradient_region(forward, back, i).pixels());
    room.dx = std::max(room.dx, back.tile(back.target, i).pixels());
  }
  return room;
}

}  // namespace wnfused::cpu

// A convolution by pieces (pieces.h): patches are transformed to a panel, multiplied plane by plane, transformed back.
//
//   Cache: panels and product stay in the second level, the bank streams past them once a panel.
#pragma once

#include "cpu/conv3x3/conv.h"
#include "cpu/pieces/pieces.h"
#include "cpu/pieces/transform.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Calls use(taps) with the number of taps of a piece, known to the compiler.
template <class Use>
WNFUSED_INLINE void with_piece_taps(const Pieces& geometry, const Use& use) {
  if (geometry.piece_taps == 3) use(std::integral_constant<int, 3>());
  else if (geometry.piece_taps == 4) use(std::integral_constant<int, 4>());
  else use(std::integral_constant<int, 5>());
}

template <int Taps>
constexpr int kPiecePlanes = Taps + kPieceOutputs - 1;

// A unit: a tile of a phase of a line, lines being numbered through all images.
struct PieceUnit {
  int64_t line, phase, tile;
};

WNFUSED_INLINE PieceUnit piece_unit(const Pieces& geometry, int64_t index) {
  const int64_t phase = index / geometry.pitch;
  return {phase / geometry.phases, phase % geometry.phases, index % geometry.pitch};
}

WNFUSED_INLINE void advance(const Pieces& geometry, PieceUnit& unit) {
  if (++unit.tile < geometry.pitch) return;
  unit.tile = 0;
  if (++unit.phase < geometry.phases) return;
  unit.phase = 0;
  ++unit.line;
}

// The line of the source that a line of the target meets by a line tap, or -1.
WNFUSED_INLINE int64_t source_line(const Pieces& geometry, int64_t line, int64_t line_tap) {
  const Triple &from = geometry.source_size, &to = geometry.target_size;
  const int64_t image = line / (to.level * to.row), within = line % (to.level * to.row);
  const int64_t level_tap = line_tap / geometry.kernel.row, row_tap = line_tap % geometry.kernel.row;
  const int64_t level = within / to.row + geometry.first.level + level_tap * geometry.dilation.level;
  const int64_t row = within % to.row + geometry.first.row + row_tap * geometry.dilation.row;
  const bool inside = level >= 0 && level < from.level && row >= 0 && row < from.row;
  return inside ? (image * from.level + level) * from.row + row : -1;
}

// Places in a map of the `Count` pixels of a line that lie a dilation apart from `first` on; -1 outside.
template <int Count>
WNFUSED_INLINE void locate_pixels(const Pieces& geometry, int64_t width, int64_t line, int64_t first,
                                  int64_t (&pixels)[Count]) {
  for (int j = 0; j < Count; ++j) {
    const int64_t x = first + j * geometry.dilation.column;
    pixels[j] = line >= 0 && x >= 0 && x < width ? line * width + x : -1;
  }
}

// The column of a unit's first output.
WNFUSED_INLINE int64_t first_output(const Pieces& geometry, const PieceUnit& unit) {
  return unit.phase + geometry.dilation.column * kPieceOutputs * unit.tile;
}

// Blocks of source channels that output blocks [first_block, first_block + blocks) sum over.
struct SourceBlocks {
  int64_t first, count;
};

WNFUSED_INLINE SourceBlocks source_blocks(const Pieces& geometry, int64_t first_block, int64_t blocks) {
  const int64_t first = geometry.source_block(first_block);
  return {first, geometry.source_block(first_block + blocks - 1) + geometry.depth_blocks() - first};
}

// Calls use(b, count, source) for the runs of output blocks [first_block, first_block + blocks) that sum over the same
// channels: b counts from `first_block`, `source` from the first of all their source blocks.
template <class Use>
WNFUSED_INLINE void for_groups(const Pieces& geometry, int64_t first_block, int64_t blocks, const Use& use) {
  const int64_t source0 = geometry.source_block(first_block);
  for (int64_t b = 0; b < blocks;) {
    const int64_t block = first_block + b;
    const int64_t count = smaller(blocks - b, geometry.group_blocks - block % geometry.group_blocks);
    use(b, count, geometry.source_block(block) - source0);
    b += count;
  }
}

// The patches that `count` units from `first` on meet by a line tap, of some blocks of channels: plane p of block b,
// row t. Units beyond the last one are zeros. False where none of them has a line of the map.
template <int Taps>
inline bool gather_patches(const Pieces& geometry, const float* map, const float* zeros, int64_t first, int64_t count,
                           int64_t line_tap, const SourceBlocks& blocks, const Panel& panel) {
  constexpr int kPlanes = kPiecePlanes<Taps>;
  const int64_t channels = geometry.source.padded_channels;
  const int64_t present = smaller(count, geometry.units - first), plane_stride = panel.plane_stride;
  map += blocks.first * kLanes;
  PieceUnit unit = piece_unit(geometry, first);
  int64_t line = source_line(geometry, unit.line, line_tap), known = unit.line;
  bool touches = false;
  for (int64_t t = 0; t < present; ++t, advance(geometry, unit)) {
    if (unit.line != known) line = source_line(geometry, known = unit.line, line_tap);
    touches |= line >= 0;
    int64_t places[kPlanes];
    locate_pixels(geometry, geometry.source.width, line, first_output(geometry, unit) + geometry.first.column, places);
    const float* pixels[kPlanes];
    for (int j = 0; j < kPlanes; ++j) pixels[j] = places[j] < 0 ? zeros : map + places[j] * channels;
    for (int64_t b = 0; b < blocks.count; ++b) {
      float* target = panel.at(0, b, t);
      for (int part = 0; part < kLanes; part += kNativeLanes) {
        Vectors<kPlanes> patch;
        WNFUSED_UNROLL for (int j = 0; j < kPlanes; ++j) patch.at[j] = load_native(pixels[j] + b * kLanes + part);
        store_vectors(target + part, plane_stride, PieceTransform<Taps>::input(patch));
      }
    }
  }
  clear_rows(panel, kPlanes, blocks.count, present, panel.rows);
  return touches;
}

// The products of `count` units with output blocks [first_block, first_block + blocks), to the outputs. False if not
// all is finite.
template <int Taps>
inline bool scatter_outputs(const Pieces& geometry, const Panel& product, int64_t first, int64_t count,
                            int64_t first_block, int64_t blocks, const ConvEpilogue<float>& epilogue) {
  constexpr int kPlanes = kPiecePlanes<Taps>;
  Block poison = zero();
  PieceUnit unit = piece_unit(geometry, first);
  for (int64_t t = 0; t < count; ++t, advance(geometry, unit)) {
    if (unit.tile >= geometry.tiles) continue;
    int64_t pixels[kPieceOutputs];
    locate_pixels(geometry, geometry.target.width, unit.line, first_output(geometry, unit), pixels);
    for (int64_t b = 0; b < blocks; ++b) {
      const Block bias = epilogue.bias ? load(epilogue.bias + (first_block + b) * kLanes) : zero();
      Block outputs[kPieceOutputs];
      WNFUSED_FOR_PARTS {
        const float* source = product.at(0, b, t) + i * kNativeLanes;
        const auto sums = PieceTransform<Taps>::output(load_vectors<kPlanes>(source, product.plane_stride));
        WNFUSED_UNROLL for (int j = 0; j < kPieceOutputs; ++j) outputs[j].part[i] = sums.at[j];
      }
      WNFUSED_UNROLL for (int j = 0; j < kPieceOutputs; ++j)
        if (pixels[j] >= 0)
          finish_pixel<Ending::kLayer>(geometry, epilogue, pixels[j], first_block + b, outputs[j], bias, poison);
    }
  }
  return sum_of(poison) == 0.0f;
}

// Item `item`: one chunk of units, one bundle of output blocks.
template <int Taps>
inline void pieces_item(const Pieces& geometry, int64_t item, const float* map, const float* zeros, const float* bank,
                        const ConvEpilogue<float>& epilogue, float* scratch, std::atomic<bool>& poisoned) {
  const auto [chunk, bundle] = geometry.conv_item(item);
  const int64_t first = chunk * geometry.conv_rows, first_block = bundle * geometry.conv_bundle_blocks;
  const int64_t count = smaller(geometry.conv_rows, geometry.units - first);
  const int64_t blocks = smaller(geometry.conv_bundle_blocks, geometry.output_blocks - first_block);
  const int64_t rows = round_up_rows(count), planes = geometry.planes;
  const SourceBlocks sources = source_blocks(geometry, first_block, blocks);
  const Panel panel(scratch, geometry.panel_rows(rows), sources.count);
  const Panel product(panel.after(geometry.line_taps * planes).data, rows, blocks);
  bank += first_block * geometry.block_floats();
  PlanePair pairs[kMaxWindowTaps];
  int64_t count_of_pairs = 0, panels = 0;
  for (int64_t l = 0; l < geometry.line_taps; ++l) {
    const Panel own = panel.after(panels * planes);
    if (!gather_patches<Taps>(geometry, map, zeros, first, geometry.panel_rows(count), l, sources, own)) continue;
    ++panels;
    for (int64_t c = 0; c < geometry.pieces; ++c)
      pairs[count_of_pairs++] = {own.at(0, 0, c), bank + (l * geometry.pieces + c) * geometry.piece_stride()};
  }
  const Depth depth{geometry.depth / kLanes, geometry.depth % kLanes, panel.rows * kLanes};
  for (int64_t p = 0; p < planes; ++p) {
    for_groups(geometry, first_block, blocks, [&](int64_t b, int64_t group_blocks, int64_t source) {
      PlanePair group_pairs[kMaxWindowTaps];
      for (int64_t i = 0; i < count_of_pairs; ++i)
        group_pairs[i] = {pairs[i].panel + p * panel.plane_stride + source * panel.rows * kLanes,
                          pairs[i].bank + p * geometry.plane_stride + b * geometry.block_floats()};
      multiply_rows(group_pairs, count_of_pairs, depth, rows, group_blocks, geometry.block_floats(),
                    product.at(p, b, 0), product.rows * kLanes);
    });
  }
  if (!scatter_outputs<Taps>(geometry, product, first, count, first_block, blocks, epilogue))
    poisoned.store(true, std::memory_order_relaxed);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

// A convolution by pieces (pieces.h): patches are transformed to a panel, multiplied plane by plane, transformed back.
//
//   Cache: panel and product stay in the second level, the bank streams past them once a panel.
#pragma once

#include "piece_transform.h"
#include "pieces.h"
#include "stage_conv.h"

namespace wnfused::cpu::WNFUSED_ISA {

static_assert(PieceTransform::kTaps == kPieceTaps && PieceTransform::kOutputs == kPieceOutputs &&
              PieceTransform::kInputs == kPiecePlanes);

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

// Calls use(j, pixel) for the `Count` pixels of a map with lines of `width` pixels that lie `dilation` apart from `first`
// on, pixel being their place in the map, or -1 outside.
template <int Count, class Use>
WNFUSED_INLINE void for_pixels(const Pieces& geometry, int64_t width, int64_t line, int64_t first, const Use& use) {
  for (int j = 0; j < Count; ++j) {
    const int64_t x = first + j * geometry.dilation;
    use(j, x >= 0 && x < width ? line * width + x : -1);
  }
}

// The pixel that is the first of a unit's outputs.
WNFUSED_INLINE int64_t first_output(const Pieces& geometry, const PieceUnit& unit) {
  return unit.phase + geometry.dilation * kPieceOutputs * unit.tile;
}

// The patches of `count` units from `first` on: plane p of block b, row t. Units beyond the last are zeros.
inline void gather_patches(const Pieces& geometry, const float* map, const float* zeros, int64_t first, int64_t count,
                           const Panel& panel) {
  const int64_t channels = geometry.source.padded_channels, blocks = geometry.source.channel_blocks;
  const int64_t present = smaller(count, geometry.units - first), plane_stride = panel.plane_stride;
  PieceUnit unit = piece_unit(geometry, first);
  for (int64_t t = 0; t < present; ++t, advance(geometry, unit)) {
    const float* pixels[kPiecePlanes];
    for_pixels<kPiecePlanes>(geometry, geometry.source.width, unit.line, first_output(geometry, unit) + geometry.first,
                             [&](int j, int64_t pixel) { pixels[j] = pixel < 0 ? zeros : map + pixel * channels; });
    for (int64_t b = 0; b < blocks; ++b) {
      Blocks<kPiecePlanes> patch;
      WNFUSED_UNROLL for (int j = 0; j < kPiecePlanes; ++j) patch.at[j] = load(pixels[j] + b * kLanes);
      patch = PieceTransform::input(patch);
      float* target = panel.at(0, b, t);
      WNFUSED_UNROLL for (int p = 0; p < kPiecePlanes; ++p) store(target + p * plane_stride, patch.at[p]);
    }
  }
  clear_rows(panel, kPiecePlanes, blocks, present, panel.rows);
}

// The products of `count` units with output blocks [first_block, first_block + blocks), to the outputs. False if not all
// is finite.
inline bool scatter_outputs(const Pieces& geometry, const Panel& product, int64_t first, int64_t count,
                            int64_t first_block, int64_t blocks, const Epilogue<float>& epilogue) {
  Block poison = zero();
  PieceUnit unit = piece_unit(geometry, first);
  for (int64_t t = 0; t < count; ++t, advance(geometry, unit)) {
    if (unit.tile >= geometry.tiles) continue;
    int64_t pixels[kPieceOutputs];
    for_pixels<kPieceOutputs>(geometry, geometry.target.width, unit.line, first_output(geometry, unit),
                              [&](int j, int64_t pixel) { pixels[j] = pixel; });
    for (int64_t b = 0; b < blocks; ++b) {
      const Block bias = epilogue.bias ? load(epilogue.bias + (first_block + b) * kLanes) : zero();
      Blocks<kPiecePlanes> sums;
      WNFUSED_UNROLL for (int p = 0; p < kPiecePlanes; ++p) sums.at[p] = load(product.at(p, b, t));
      const Blocks<kPieceOutputs> outputs = PieceTransform::output(sums);
      WNFUSED_UNROLL for (int j = 0; j < kPieceOutputs; ++j)
        if (pixels[j] >= 0)
          finish_pixel<Ending::kLayer>(geometry, epilogue, pixels[j], first_block + b, outputs.at[j], bias, poison);
    }
  }
  return horizontal_sum(poison) == 0.0f;
}

// Item `item`: one chunk of units, one group of output blocks.
inline void pieces_item(const Pieces& geometry, int64_t item, const float* map, const float* zeros, const float* bank,
                        const Epilogue<float>& epilogue, float* scratch, std::atomic<bool>& poisoned) {
  const auto [chunk, group] = geometry.conv_item(item);
  const int64_t first = chunk * geometry.conv_rows, first_block = group * geometry.conv_group_blocks;
  const int64_t count = smaller(geometry.conv_rows, geometry.units - first);
  const int64_t blocks = smaller(geometry.conv_group_blocks, geometry.output_blocks - first_block);
  const int64_t rows = round_up_rows(count);
  const Panel panel(scratch, geometry.panel_rows(rows), geometry.source.channel_blocks);
  const Panel product(panel.after(kPiecePlanes).data, rows, blocks);
  gather_patches(geometry, map, zeros, first, geometry.panel_rows(count), panel);
  const Depth depth{geometry.source.channels / kLanes, geometry.source.channels % kLanes, panel.rows * kLanes};
  bank += first_block * geometry.block_floats();
  for (int64_t p = 0; p < kPiecePlanes; ++p) {
    PlanePair pieces[kMaxPieces];
    for (int64_t c = 0; c < geometry.pieces; ++c)
      pieces[c] = {panel.at(p, 0, c), bank + c * geometry.piece_stride() + p * geometry.plane_stride};
    multiply_rows(pieces, geometry.pieces, depth, rows, blocks, geometry.block_floats(), product.at(p, 0, 0),
                  product.rows * kLanes);
  }
  if (!scatter_outputs(geometry, product, first, count, first_block, blocks, epilogue))
    poisoned.store(true, std::memory_order_relaxed);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

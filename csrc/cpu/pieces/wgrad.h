// The weight gradient of a convolution by pieces (pieces.h): for every line tap, piece and plane
//
//   sums[piece] = sum over units   patch[unit + piece]' x gradient[unit]
//
// by the slices, in the order of sums, of conv3x3/wgrad.h; at the end of a slice the planes of a piece become its taps.
#pragma once

#include "cpu/conv3x3/wgrad.h"
#include "cpu/pieces/conv.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Gradients of the outputs of `count` units, of output blocks [first_block, first_block + blocks), added to `bias`,
// too.
template <int Taps>
inline void gather_output_gradients(const Pieces& geometry, const float* map, int64_t first, int64_t count,
                                    int64_t first_block, int64_t blocks, const Panel& panel, Block* bias) {
  constexpr int kPlanes = kPiecePlanes<Taps>;
  const int64_t channels = geometry.padded_outputs;
  Block sum[kMaxBundleBlocks];
  for (Block& block : sum) block = zero();
  PieceUnit unit = piece_unit(geometry, first);
  for (int64_t t = 0; t < count; ++t, advance(geometry, unit)) {
    if (unit.tile >= geometry.tiles) {
      clear_rows(panel, kPlanes, blocks, t, t + 1);
      continue;
    }
    int64_t pixels[kPieceOutputs];
    locate_pixels(geometry, geometry.target.width, unit.line, first_output(geometry, unit), pixels);
    for (int64_t b = 0; b < blocks; ++b) {
      WNFUSED_FOR_PARTS {
        const int64_t lane = (first_block + b) * kLanes + i * kNativeLanes;
        Vectors<kPieceOutputs> tile;
        WNFUSED_UNROLL for (int j = 0; j < kPieceOutputs; ++j)
          tile.at[j] = pixels[j] >= 0 ? load_native(map + pixels[j] * channels + lane) : Native{};
        sum[b].part[i] = sum[b].part[i] + ((tile.at[0] + tile.at[1]) + (tile.at[2] + tile.at[3]));
        store_vectors(panel.at(0, b, t) + i * kNativeLanes, panel.plane_stride, PieceTransform<Taps>::gradient(tile));
      }
    }
  }
  for (int64_t b = 0; b < blocks; ++b) bias[b] = bias[b] + sum[b];
}

// The taps of a slice, of `blocks` output blocks from `first_block` on, from their sums.
template <int Taps>
inline void reduce_pieces(const Pieces& geometry, const float* sums, int64_t slice, int64_t first_block, int64_t blocks,
                          float* banks) {
  constexpr int kPlanes = kPiecePlanes<Taps>;
  const int64_t floats = geometry.block_floats(), stride = geometry.direct.plane_stride;
  const int64_t row_taps = geometry.kernel.column;
  for (int64_t i = 0; i < geometry.line_taps * geometry.pieces; ++i, sums += kPlanes * geometry.sums_stride) {
    const int64_t first_tap = i % geometry.pieces * Taps, taps = smaller(Taps, row_taps - first_tap);
    for (int64_t b = 0; b < blocks; ++b) {
      float* target = banks + geometry.gradient_offset(first_block + b, slice) +
                      (i / geometry.pieces * row_taps + first_tap) * stride;
      for (int64_t k = 0; k < floats; k += kNativeLanes) {
        const auto planes = load_vectors<kPlanes>(sums + b * floats + k, geometry.sums_stride);
        const Vectors<Taps> gradient = PieceTransform<Taps>::filter_gradient(planes);
        for (int64_t r = 0; r < taps; ++r) store_native(target + r * stride + k, gradient.at[r]);
      }
    }
  }
}

// Adds the products of a panel, for one piece, to its planes of sums.
inline void add_piece(const Pieces& geometry, const Panel& panel, const Panel& gradients, int64_t piece, int64_t count,
                      int64_t first_block, int64_t blocks, float* sums) {
  const int64_t floats = geometry.block_floats();
  for (int64_t p = 0; p < geometry.planes; ++p, sums += geometry.sums_stride)
    for_groups(geometry, first_block, blocks, [&](int64_t b, int64_t group_blocks, int64_t source) {
      for (int64_t i = 0; i < geometry.depth_blocks(); ++i)
        multiply_outer(panel.at(p, source + i, piece), gradients.at(p, b, 0), gradients.rows * kLanes, count,
                       group_blocks, true, sums + b * floats + i * kLanes * kLanes, floats);
    });
}

// Item `item` of a weight gradient: one slice of units, one bundle of output blocks.
template <int Taps>
inline void pieces_gradient_item(const Pieces& geometry, int64_t item, const float* x, const float* dy,
                                 const float* zeros, float* banks, float* bias_gradients, float* scratch) {
  const auto [slice, bundle] = geometry.wgrad_item(item);
  const int64_t first_block = bundle * geometry.wgrad_bundle_blocks;
  const int64_t rows = geometry.wgrad_rows, planes = geometry.planes;
  const int64_t blocks = smaller(geometry.wgrad_bundle_blocks, geometry.output_blocks - first_block);
  const int64_t begin = slice * geometry.wgrad_slice_units;
  const int64_t end = smaller(begin + geometry.wgrad_slice_units, geometry.units);
  const SourceBlocks sources = source_blocks(geometry, first_block, blocks);
  const Panel panel(scratch, geometry.panel_rows(rows), sources.count);
  const Panel gradients(panel.after(planes).data, rows, blocks);
  float* sums = gradients.after(planes).data;
  __builtin_memset(sums, 0, geometry.line_taps * geometry.line_planes() * geometry.sums_stride * sizeof(float));
  Block bias[kMaxBundleBlocks];
  for (Block& sum : bias) sum = zero();
  for (int64_t first = begin; first < end; first += rows) {
    const int64_t count = smaller(rows, end - first);
    gather_output_gradients<Taps>(geometry, dy, first, count, first_block, blocks, gradients, bias);
    for (int64_t l = 0; l < geometry.line_taps; ++l) {
      if (!gather_patches<Taps>(geometry, x, zeros, first, geometry.panel_rows(count), l, sources, panel)) continue;
      float* piece_sums = sums + l * geometry.line_planes() * geometry.sums_stride;
      for (int64_t c = 0; c < geometry.pieces; ++c, piece_sums += planes * geometry.sums_stride)
        add_piece(geometry, panel, gradients, c, count, first_block, blocks, piece_sums);
    }
  }
  reduce_pieces<Taps>(geometry, sums, slice, first_block, blocks, banks);
  float* bias_gradient = bias_gradients + slice * geometry.padded_outputs + first_block * kLanes;
  for (int64_t b = 0; b < blocks; ++b) store(bias_gradient + b * kLanes, bias[b]);
}

}  // namespace wnfused::cpu::WNFUSED_ISA

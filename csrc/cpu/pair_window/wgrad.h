// The weight gradient of a convolution over a window, on pairs of bfloat16: turned panels (pair_window.h), chunk by
// chunk, every tap a product of its own.
#pragma once

#include "cpu/pair_window/conv.h"
#include "cpu/pair_window/operand_maps.h"

namespace wnfused::cpu::WNFUSED_ISA {

// dz of a chunk, of `blocks` output blocks: [O][image][lines][pixels].
inline void turn_outputs(const PairWindow& window, const uint16_t* dz, const PairChunk& chunk, int64_t first_block,
                         int64_t blocks, uint16_t* target) {
  const MapShape& map = window.target;
  const int64_t plane = window.wgrad_plane, line = window.wgrad_line_pixels, channels = map.channels;
  const int64_t image = window.thin ? chunk.lines * line : window.wgrad_run;
  __builtin_memset(target, 0, window.wgrad_outputs() * sizeof(uint16_t));
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t channel0 = (first_block + b) * kLanes, here = smaller(channels - channel0, kLanes);
    for (int64_t il = 0; il < chunk.images * chunk.lines; ++il) {
      const int64_t i = il / chunk.lines, l = il - i * chunk.lines;
      const uint16_t* source = line_of(map, dz, chunk.image + i, chunk.line + l) + chunk.column * channels + channel0;
      for (int64_t x = 0; x < chunk.columns; x += kLanes) {
        const int64_t pixels = smaller(chunk.columns - x, kLanes);
        Block block[kLanes];
        for (int64_t p = 0; p < kLanes; ++p) {
          const uint16_t* pixel = source + (x + p) * channels;
          block[p] = p >= pixels ? zero() : here == kLanes ? load(pixel) : load(pixel, here);
        }
        transpose(block);
        uint16_t* corner = target + b * kLanes * plane + i * image + l * line + x;
        for (int64_t o = 0; o < here; ++o) {
          if (pixels == kLanes) {
            store_rounded(corner + o * plane, block[o]);
          } else {
            uint16_t entries[kLanes];
            store_rounded(entries, block[o]);
            copy_entries(corner + o * plane, entries, pixels);
          }
        }
      }
    }
  }
}

// Image `image` of x of a chunk: [residue][input block][shift][pixel / 2][16][2]. `line`: a line of pixels.
inline void turn_inputs(const PairWindow& window, const uint16_t* x, const PairChunk& chunk, int64_t image,
                        uint16_t* target, uint16_t* line) {
  const PairGrid& grid = window.wgrad_grid;
  const int64_t padded = window.source.padded_channels, blocks = window.source.channel_blocks;
  const int64_t pixels = window.wgrad_line_pixels, step = window.column_step, panel = window.wgrad_span * kLanes;
  const int64_t row0 = grid.source_row + chunk.line * window.row_step, columns = window.column_residues();
  const int64_t column0 = grid.source_column + chunk.column * step;
  for (int64_t row = 0; row < window.row_residues(); ++row) {
    const int64_t lines = chunk.lines + (grid.reach_rows - 1 - row) / window.row_step;
    for (int64_t k = 0; k < lines; ++k) {
      copy_line(window.source, line_of(window.source, x, image, row0 + row + k * window.row_step), column0, 1,
                pixels * step, padded, line);
      for (int64_t column = 0; column < columns; ++column) {
        // Whether a tap of this residue is shifted by an odd number.
        const bool shifted = column + step < grid.reach_columns;
        for (int64_t b = 0; b < blocks; ++b) {
          uint16_t* at = target + (((row * columns + column) * blocks + b) * window.wgrad_shifts) * panel +
                         k * pixels * kLanes;
          const uint16_t* source = line + column * padded + b * kLanes;
          for (int64_t p = 0; p < pixels; p += 2, source += 2 * step * padded, at += 2 * kLanes) {
            const uint16_t *second = source + step * padded, *third = source + 2 * step * padded;
            store_bits(at, load_pairs(source, second));
            // A pixel of the next line is of no tap.
            if (shifted) store_bits(at + panel, load_pairs(second, p + 2 < pixels ? third : nullptr));
          }
        }
      }
    }
    for (int64_t i = 0; i < columns * blocks * window.wgrad_shifts; ++i) {
      uint16_t* at = target + (row * columns * blocks * window.wgrad_shifts + i) * panel;
      __builtin_memset(at + lines * pixels * kLanes, 0, (panel - lines * pixels * kLanes) * sizeof(uint16_t));
    }
  }
}

// A thin source's rows of a chunk: [depth / 16][pixel / 2][16][2]. `scratch`: as a convolution's item has it.
inline void turn_rows(const PairWindow& window, const uint16_t* x, const PairChunk& chunk, uint16_t* target,
                      float* scratch) {
  const PairGrid& grid = window.wgrad_grid;
  uint16_t* rows = reinterpret_cast<uint16_t*>(scratch);
  uint16_t* lines = reinterpret_cast<uint16_t*>(scratch + window.lines_at());
  gather_rows(window, grid, x, chunk, lines, rows);
  const int64_t pixels = chunk.images * chunk.lines * chunk.columns, panel = window.wgrad_span * kLanes;
  // What a row's last block reads of the next row are lanes that nobody reads.
  for (int64_t p = 0; p < window.wgrad_run; p += 2, rows += 2 * grid.depth, target += 2 * kLanes)
    for (int64_t b = 0; b < window.wgrad_input_blocks; ++b) {
      const uint16_t* at = rows + b * kLanes;
      store_bits(target + b * panel, load_pairs(p < pixels ? at : nullptr, p + 1 < pixels ? at + grid.depth : nullptr));
    }
}

// Item `item` of the weight gradient: a slice, a bundle of output blocks.
inline void pair_window_gradient_item(const PairWindow& window, int64_t item, const uint16_t* x, const uint16_t* dz,
                                      float* sums, float* scratch) {
  const auto [slice, bundle] = window.wgrad_item(item);
  const int64_t first_block = bundle * window.wgrad_bundle_blocks;
  const int64_t blocks = smaller(window.wgrad_bundle_blocks, window.output_blocks - first_block);
  uint16_t* inputs = reinterpret_cast<uint16_t*>(scratch);
  uint16_t* outputs = reinterpret_cast<uint16_t*>(scratch + window.wgrad_outputs_at());
  scratch += window.wgrad_rows_at();
  sums += slice * window.gradient_size() + first_block * kLanes * kLanes;

  const PairGrid& grid = window.wgrad_grid;
  const int64_t panel = window.wgrad_span * kLanes, block = window.wgrad_shifts * panel;
  const int64_t first = slice * window.wgrad_slice_chunks;
  const int64_t end = smaller(first + window.wgrad_slice_chunks, window.wgrad_chunks);
  int64_t offsets[kMaxGroups];
  const int64_t groups = blocks * window.block_groups();
  for (int64_t i = 0; i < groups; ++i) offsets[i] = i * window.tile_rows * window.wgrad_plane;
  for (int64_t chunk = first; chunk < end; ++chunk) {
    const PairChunk where = window.wgrad_chunk(chunk);
    turn_outputs(window, dz, where, first_block, blocks, outputs);
    const int64_t segments = window.wgrad_segments(where.images), image = window.wgrad_image_inputs();
    const auto multiply = [&](int64_t tap, const uint16_t* bank) {
      Segment parts[kMaxImages];
      for (int64_t i = 0; i < segments; ++i) parts[i] = {outputs + i * window.wgrad_run, bank + i * image};
      const PairProduct product{parts, segments, window.wgrad_run, window.wgrad_plane, block, chunk > first};
      PlainSink sink{sums + tap * window.tap_sums(), window.padded_outputs * kLanes, window.tile_rows};
      Pairs::multiply(product, offsets, groups, window.wgrad_input_blocks, sink);
    };
    if (window.thin) {
      turn_rows(window, x, where, inputs, scratch);
      multiply(0, inputs);
      continue;
    }
    for (int64_t i = 0; i < segments; ++i)
      turn_inputs(window, x, where, where.image + i, inputs + i * image, reinterpret_cast<uint16_t*>(scratch));
    for (int64_t s = 0; s < grid.segments; ++s) {
      const PairSegment& segment = window.segments[grid.first_segment + s];
      for (int64_t t = 0; t < grid.run; ++t) {
        const int64_t column = segment.column + t;
        const int64_t residue = segment.row % window.row_step * window.column_residues() + column % window.column_step;
        const int64_t shift = segment.row / window.row_step * window.wgrad_line_pixels + column / window.column_step;
        const uint16_t* bank = inputs + residue * window.source.channel_blocks * block + shift % 2 * panel +
                               shift / 2 * (2 * kLanes);
        multiply(segment.first_plane + t * segment.plane_step, bank);
      }
    }
  }
}

}  // namespace wnfused::cpu::WNFUSED_ISA

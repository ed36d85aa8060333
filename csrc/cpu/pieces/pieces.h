// A convolution of stride 1 by Winograd's method along the lines of its map: a row of the kernel is one piece of three
// or five taps, or several of four, each of them F(4, taps) (transform.h).
//
//   y[t] = sum over pieces c, r = 0..3   w[4c + r] x[t + d (4c + r) - p]       d the dilation, p the padding
//
// The outputs of a line fall into d phases, t = phase + d u, each a convolution without dilation. Four outputs of a
// phase, u = 4 tile + 0..3, meet with piece c the seven inputs of tile + c, whatever the two are: every patch is
// transformed once and serves all pieces, as
//
//   product[tile] = sum over c   patch[tile + c] x bank[c]     of each of seven planes
//
// so that 7 ceil(k / 4) / 4 multiplications take the place of k: 3.5 of 7, 5.25 of 11; of three taps 1.5, of five 2.
// Rows of the matrix products, `units`, are the tiles of a phase and behind them the pieces - 1 patches that its last
// tiles meet, which stand for no output; then those of the next phase.
//
// A kernel of several levels or rows is the sum of so many convolutions along lines ("line taps"), each with a panel of
// its own; one of a single column, whose taps lie a line apart, is one along a line that is the whole map, the width
// being its dilation.
//
// With groups, an output block sums over the channels of its own group, or of those that share it (window.h): whole
// blocks.
//
// Layout of a bank: [line tap][piece][plane][output block][input channel][16 lanes]. Gradients are of taps again:
// [output block][slice][tap][input channel][16 lanes].
#pragma once

#include "cpu/window/window.h"

namespace wnfused::cpu {

constexpr int64_t kPieceOutputs = 4;

struct Pieces : Division {
  Window direct;  // the same as a sum over taps, whose way of packing weights and of finishing their gradient it shares
  MapShape source, target;
  Triple source_size, target_size;
  Triple kernel, dilation;
  Triple first;  // where the first tap of a map's first output is
  bool turned;   // the last tap first: a data gradient
  int64_t piece_taps, planes, pieces, line_taps;
  int64_t phases, tiles, pitch;  // of a line; of a phase; units from one phase to the next
  int64_t units;
  int64_t output_blocks, padded_outputs;
  int64_t group_blocks, depth;  // output blocks that sum over the same channels; how many channels these are
  int64_t plane_stride, sums_stride;  // of a bank; of a plane of sums of a weight gradient

  int64_t panel_rows(int64_t units) const { return units + pieces - 1; }
  int64_t depth_blocks() const { return divide_up(depth, kLanes); }
  int64_t block_floats() const { return depth_blocks() * kLanes * kLanes; }
  // The first block of source channels that an output block sums over.
  int64_t source_block(int64_t output_block) const { return output_block / group_blocks * depth_blocks(); }
  int64_t piece_stride() const { return planes * plane_stride; }
  int64_t line_planes() const { return pieces * planes; }  // of a line tap
  int64_t bank_size() const { return line_taps * line_planes() * plane_stride; }
  // Of the taps of an output block.
  int64_t direct_floats() const { return direct.bank_size(); }
  int64_t gradient_size() const { return output_blocks * direct_floats(); }  // what one slice adds
  int64_t gradient_offset(int64_t output_block, int64_t slice) const {
    return (output_block * wgrad_slices + slice) * direct_floats();
  }
};

// Whether these kernels take a layer, which is sound, with enough outputs for that to be less work than a direct sum.
bool suits_pieces(const ConvShape& shape);

// back: of the data gradient.
Pieces make_pieces(const ConvShape& shape, bool back, int64_t workers);

// Floats that a worker needs: panel and product of one chunk, or what packing and finishing take. And those of the line
// of zeros, which whoever runs the kernels must clear: the same from x to y and back.
int64_t worker_floats(const Pieces& geometry);
int64_t zeros_floats(const Pieces& geometry);

}  // namespace wnfused::cpu

// A convolution along lines, stride 1, by Winograd's method: the kernel in pieces of four taps, each of them F(4, 4).
//
//   y[t] = sum over pieces c, r = 0..3   w[4c + r] x[t + d (4c + r) - p]       d the dilation, p the padding
//
// The outputs of a line fall into d phases, t = phase + d u, each a convolution without dilation. Four outputs of a
// phase, u = 4 tile + 0..3, meet with piece c the seven inputs of tile + c, whatever the two are: every patch is
// transformed once and serves all pieces, as
//
//   product[tile] = sum over c   patch[tile + c] x bank[c]     of each of seven planes
//
// so that 7 ceil(k / 4) / 4 multiplications take the place of k: 1.75 of 3, 3.5 of 7, 5.25 of 11. Rows of the matrix
// products, `units`, are the tiles of a phase and behind them the pieces - 1 patches that its last tiles meet, which
// stand for no output; then those of the next phase.
//
// Layout of a bank: [piece][plane][output block][input channel][16 lanes]. Gradients are of taps again:
// [output block][slice][tap][input channel][16 lanes].
#pragma once

#include "window.h"

namespace wnfused::cpu {

constexpr int64_t kPieceTaps = 4, kPieceOutputs = 4, kPiecePlanes = 7;
constexpr int64_t kMaxPieces = (kMaxWindowTaps + kPieceTaps - 1) / kPieceTaps;

struct Pieces : Division {
  Window direct;            // the same as a sum over taps: its weights are packed, and its gradient is finished, as theirs
  MapShape source, target;  // `height` lines of `width` pixels an image
  int64_t taps, pieces;
  bool turned;              // the last tap first: a data gradient
  int64_t dilation, first;  // first: the pixel that the first tap of a line's first output meets
  int64_t phases, tiles, pitch;  // of a line; of a phase; units from one phase to the next
  int64_t units;
  int64_t output_blocks, padded_outputs;
  int64_t plane_stride, sums_stride;  // of a bank; of a plane of sums of a weight gradient

  int64_t panel_rows(int64_t units) const { return units + pieces - 1; }
  int64_t block_floats() const { return source.padded_channels * kLanes; }
  int64_t piece_stride() const { return kPiecePlanes * plane_stride; }
  int64_t bank_size() const { return pieces * piece_stride(); }
  // Of the taps of an output block.
  int64_t direct_floats() const { return taps * direct.plane_stride; }
  int64_t gradient_size() const { return output_blocks * direct_floats(); }  // of a slice
  int64_t gradient_offset(int64_t output_block, int64_t slice) const {
    return (output_block * wgrad_slices + slice) * direct_floats();
  }
};

// Whether the shape is such a convolution, of whose outputs none lies wholly in the padding: what is exactly 0 there, and
// has no gradient behind a ReLU, would be rounded. The shape is sound.
bool has_pieces(const ConvShape& shape);

// .. and one with enough outputs for that to be less work than a direct sum.
bool suits_pieces(const ConvShape& shape);

// back: of the data gradient.
Pieces make_pieces(const ConvShape& shape, bool back, int64_t workers);

}  // namespace wnfused::cpu

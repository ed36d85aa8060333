// Banks of a convolution by pieces (pieces.h): weights packed as for a sum over taps, then transformed.
#pragma once

#include "cpu/pieces/conv.h"
#include "cpu/window/pack.h"

namespace wnfused::cpu::WNFUSED_ISA {

// One output block: from its taps to `bank`, where its part of the first plane begins.
template <int Taps>
inline void put_pieces(const Pieces& geometry, const float* taps, float* bank) {
  const int64_t stride = geometry.direct.plane_stride, row_taps = geometry.kernel.column;
  const int64_t last = geometry.line_taps * row_taps - 1;
  for (int64_t i = 0; i < geometry.line_taps * geometry.pieces; ++i, bank += geometry.piece_stride()) {
    const int64_t first_tap = i % geometry.pieces * Taps, first = i / geometry.pieces * row_taps + first_tap;
    const float* tap[Taps] = {};
    for (int64_t r = 0; r < smaller(Taps, row_taps - first_tap); ++r)
      tap[r] = taps + (geometry.turned ? last - (first + r) : first + r) * stride;
    for (int64_t k = 0; k < geometry.depth * kLanes; k += kNativeLanes) {
      Vectors<Taps> filter;
      WNFUSED_UNROLL for (int r = 0; r < Taps; ++r) filter.at[r] = tap[r] ? load_native(tap[r] + k) : Native{};
      store_vectors(bank + k, geometry.plane_stride, PieceTransform<Taps>::filter(filter));
    }
  }
}

}  // namespace wnfused::cpu::WNFUSED_ISA

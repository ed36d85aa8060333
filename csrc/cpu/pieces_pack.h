// Banks of a convolution by pieces (pieces.h): weights packed as for a sum over taps, then transformed.
#pragma once

#include "piece_transform.h"
#include "pieces.h"
#include "window_pack.h"

namespace wnfused::cpu::WNFUSED_ISA {

// One output block: from its taps to `bank`, where its part of the first plane begins.
inline void put_pieces(const Pieces& geometry, const float* taps, float* bank) {
  const int64_t stride = geometry.direct.plane_stride, last = geometry.taps - 1;
  for (int64_t c = 0; c < geometry.pieces; ++c, bank += geometry.piece_stride()) {
    const float* tap[kPieceTaps] = {};
    for (int64_t r = 0; r < kPieceTaps; ++r) {
      const int64_t k = c * kPieceTaps + r;
      if (k <= last) tap[r] = taps + (geometry.turned ? last - k : k) * stride;
    }
    for (int64_t i = 0; i < geometry.source.channels * kLanes; i += kLanes) {
      Blocks<kPieceTaps> filter;
      WNFUSED_UNROLL for (int r = 0; r < kPieceTaps; ++r) filter.at[r] = tap[r] ? load(tap[r] + i) : zero();
      const Blocks<kPiecePlanes> planes = PieceTransform::filter(filter);
      WNFUSED_UNROLL for (int p = 0; p < kPiecePlanes; ++p) store(bank + p * geometry.plane_stride + i, planes.at[p]);
    }
  }
}

}  // namespace wnfused::cpu::WNFUSED_ISA

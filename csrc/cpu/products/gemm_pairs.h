// Two bfloat16 as the unit of a product's depth, by AVX512_BF16's VDPBF16PS; denormals count as zero there.
#pragma once

#include "cpu/products/gemm.h"

namespace wnfused::cpu::WNFUSED_ISA {

struct PairUnits : PairRuns, VectorProducts<PairUnits> {
  static constexpr DepthUnit kUnit{2};

  WNFUSED_INLINE static Block multiply_add(const Block& a, const Block& b, const Block& sum) {
    return {_mm512_dpbf16_ps(sum.part[0], (__m512bh)a.part[0], (__m512bh)b.part[0])};
  }
};

}  // namespace wnfused::cpu::WNFUSED_ISA

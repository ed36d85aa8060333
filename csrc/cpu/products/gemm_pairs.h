// Two bfloat16 as the unit of a product's depth, by AVX512_BF16's VDPBF16PS; denormals count as zero there.
#pragma once

#include "cpu/products/gemm.h"
#include "cpu/products/pairs.h"

namespace wnfused::cpu::WNFUSED_ISA {

struct PairUnits {
  static constexpr int64_t kEntries = 2;

  WNFUSED_INLINE static Block multiply_add(const Block& a, const Block& b, const Block& sum) {
    return {_mm512_dpbf16_ps(sum.part[0], (__m512bh)a.part[0], (__m512bh)b.part[0])};
  }

  template <class T>
  WNFUSED_INLINE static Block along(const Runs<T>& runs, int64_t run, int64_t unit) {
    const Block first = runs.entries(run, 2 * unit), second = runs.entries(run, 2 * unit + kLanes);
    return {(Native)_mm512_cvtne2ps_pbh(second.part[0], first.part[0])};
  }

  template <class T>
  WNFUSED_INLINE static Block across(const Runs<T>& runs, int64_t unit, int64_t at) {
    return rounded_pairs(runs.entries(2 * unit, at), runs.entries(2 * unit + 1, at));
  }
};

}  // namespace wnfused::cpu::WNFUSED_ISA

// Products of pairs by AVX512_BF16's VDPBF16PS: 16 accumulators, 8 rows x 2 output blocks, or 16 rows x 1 where there is
// one block only.
//
// Floor: 2 instructions of 32 multiply-adds a cycle; the 8 x 2 tile loads 10 times for 16 of them, the 16 x 1 tile 17.
#pragma once

#include "stage_pairs.h"

namespace wnfused::cpu::WNFUSED_ISA {

class Pairs {
 public:
  static constexpr PairTile kTile = {8, 2, false};

  static void begin() {}
  static void end() {}

  // Groups of 8 rows, group g at row_offset[g] elements from each segment's rows, times `cols` output blocks.
  static void multiply(const PairProduct& product, const int64_t* row_offset, int64_t groups, int64_t cols) {
    constexpr int64_t kGroup = kTile.rows * kLanes;
    int64_t c = 0;
    for (; c + 2 <= cols; c += 2)
      for (int64_t g = 0; g < groups; ++g)
        tile<1, 2>(product, row_offset + g, c, product.out + c * product.out_stride + g * kGroup);
    if (c == cols) return;
    float* out = product.out + c * product.out_stride;
    int64_t g = 0;
    for (; g + 2 <= groups; g += 2) tile<2, 1>(product, row_offset + g, c, out + g * kGroup);
    if (g < groups) tile<1, 1>(product, row_offset + g, c, out + g * kGroup);
  }

 private:
  template <int Groups, int Cols>
  static void tile(const PairProduct& product, const int64_t* row_offset, int64_t col, float* out) {
    constexpr int kRows = Groups * kTile.rows;
    __m512 accumulator[kRows][Cols];
    WNFUSED_UNROLL for (int r = 0; r < kRows; ++r) {
      WNFUSED_UNROLL for (int c = 0; c < Cols; ++c)
        accumulator[r][c] = product.accumulate ? _mm512_loadu_ps(out + c * product.out_stride + r * kLanes)
                                               : _mm512_setzero_ps();
    }
    // Eight rows are addressed by one pointer and these offsets; eight pointers would not stay in registers.
    const int64_t stride = product.row_stride * sizeof(uint16_t);
    int64_t offset[8] = {0, stride, 2 * stride, 3 * stride, 4 * stride, 5 * stride, 6 * stride, 7 * stride};
    for (int64_t s = 0; s < product.segment_count; ++s) {
      const char* rows[Groups];
      WNFUSED_UNROLL for (int g = 0; g < Groups; ++g)
        rows[g] = reinterpret_cast<const char*>(product.segments[s].rows + row_offset[g]);
      const uint16_t* bank = product.segments[s].bank + col * product.bank_stride;
      for (int64_t k = product.depth; k > 0; k -= 2, bank += 2 * kLanes) {
        // Without this the compiler makes a pointer of its own for every row after all.
        asm("" : "+r"(offset[1]), "+r"(offset[2]), "+r"(offset[3]), "+r"(offset[5]), "+r"(offset[7]));
        __m512i weight[Cols];
        WNFUSED_UNROLL for (int c = 0; c < Cols; ++c) weight[c] = _mm512_loadu_si512(bank + c * product.bank_stride);
        WNFUSED_UNROLL for (int r = 0; r < kRows; ++r) {
          int32_t pair;
          __builtin_memcpy(&pair, rows[r / 8] + offset[r % 8], sizeof pair);
          const __m512i pairs = _mm512_set1_epi32(pair);
          WNFUSED_UNROLL for (int c = 0; c < Cols; ++c)
            accumulator[r][c] = _mm512_dpbf16_ps(accumulator[r][c], (__m512bh)pairs, (__m512bh)weight[c]);
        }
        WNFUSED_UNROLL for (int g = 0; g < Groups; ++g) rows[g] += sizeof(int32_t);
      }
    }
    WNFUSED_UNROLL for (int r = 0; r < kRows; ++r) {
      WNFUSED_UNROLL for (int c = 0; c < Cols; ++c)
        _mm512_storeu_ps(out + c * product.out_stride + r * kLanes, accumulator[r][c]);
    }
  }
};

}  // namespace wnfused::cpu::WNFUSED_ISA

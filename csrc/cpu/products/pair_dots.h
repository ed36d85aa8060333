// Products of pairs by AVX512_BF16's VDPBF16PS: 16 accumulators, 8 rows x 2 output blocks, or 16 rows x 1 where there
// is one block only; 24, 8 rows x 3, for the last three blocks of an odd number.
//
// Floor: 2 instructions of 32 multiply-adds a cycle, as many loads. The 8 x 2 tile loads 10 times for 16 instructions,
// the 16 x 1 tile 17 times; where neighbouring pixels share what they read, each load serves three taps instead, 23 for
// 48.
#pragma once

#include "cpu/products/pairs.h"

namespace wnfused::cpu::WNFUSED_ISA {

class Pairs {
 public:
  static constexpr PairTile kTile = {8, 2, false};

  static void begin() {}
  static void end() {}
  static void keep_awake() {}

  // Groups of 8 rows, group g at row_offset[g] elements from each segment's rows, times `cols` output blocks.
  template <class Sink>
  static void multiply(const PairProduct& product, const int64_t* row_offset, int64_t groups, int64_t cols,
                       Sink& sink) {
    int64_t c = 0;
    for (; cols - c >= 2 && cols - c != 3; c += 2)
      for (int64_t g = 0; g < groups; ++g) tile<1, 2>(product, row_offset, g, c, sink);
    if (cols - c == 3)
      for (int64_t g = 0; g < groups; ++g) tile<1, 3>(product, row_offset, g, c, sink);
    if (cols - c != 1) return;
    int64_t g = 0;
    const bool shared = product.neighbours && product.row_stride == kLanes && !product.accumulate;
    for (; g + 2 <= groups && !product.scattered; g += 2) {
      if (shared) neighbour_tile(product, row_offset, g, c, sink);
      else tile<2, 1>(product, row_offset, g, c, sink);
    }
    for (; g < groups; ++g) tile<1, 1>(product, row_offset, g, c, sink);
  }

 private:
  template <int Groups, int Cols, class Sink>
  static void tile(const PairProduct& product, const int64_t* row_offset, int64_t group, int64_t col, Sink& sink) {
    constexpr int kRows = Groups * kTile.rows;
    const TileSums sums = sink.place(group, Groups, col, Cols);
    row_offset += product.scattered ? group * kTile.rows : group;
    __m512 accumulator[kRows][Cols];
    WNFUSED_UNROLL for (int r = 0; r < kRows; ++r) {
      WNFUSED_UNROLL for (int c = 0; c < Cols; ++c)
        accumulator[r][c] = product.accumulate ? _mm512_loadu_ps(sums.out + c * sums.block_stride + r * kLanes)
                                               : _mm512_setzero_ps();
    }
    // Eight rows are addressed by one pointer and these offsets; eight pointers would not stay in registers.
    int64_t offset[8];
    WNFUSED_UNROLL for (int r = 0; r < 8; ++r)
      offset[r] = (product.scattered ? row_offset[r] - row_offset[0] : r * product.row_stride) * sizeof(uint16_t);
    for (int64_t s = 0; s < product.segment_count; ++s) {
      const char* rows[Groups];
      WNFUSED_UNROLL for (int g = 0; g < Groups; ++g)
        rows[g] = reinterpret_cast<const char*>(product.segments[s].rows + row_offset[g]);
      const uint16_t* bank = product.segments[s].bank + col * product.bank_stride;
      for (int64_t k = product.depth; k > 0; k -= 2, bank += 2 * kLanes) {
        // Without this the compiler makes a pointer of its own for every row after all.
        asm("" : "+r"(offset[1]), "+r"(offset[2]), "+r"(offset[3]), "+r"(offset[4]), "+r"(offset[5]), "+r"(offset[6]),
                 "+r"(offset[7]));
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
        _mm512_storeu_ps(sums.out + c * sums.block_stride + r * kLanes, accumulator[r][c]);
    }
    sink.ready(sums, group, Groups, col, Cols);
  }

  // Two groups of eight neighbours of 16 channels: a pair of pixel i is tap t of pixel i - t.
  template <class Sink>
  static void neighbour_tile(const PairProduct& product, const int64_t* row_offset, int64_t group, int64_t col,
                             Sink& sink) {
    constexpr int kGroup = kTile.rows, kRows = 2 * kGroup, kSide = 3;
    const TileSums sums = sink.place(group, 2, col, 1);
    row_offset += group;
    __m512 accumulator[kRows];
    WNFUSED_UNROLL for (int r = 0; r < kRows; ++r) accumulator[r] = _mm512_setzero_ps();
    for (int64_t s = 0; s < product.segment_count; ++s) {
      const uint16_t* pixels[2] = {product.segments[s].rows + row_offset[0], product.segments[s].rows + row_offset[1]};
      const uint16_t* bank = product.segments[s].bank + col * product.bank_stride;
      for (int k = 0; k < kLanes; k += 2, bank += 2 * kLanes) {
        __m512i weight[kSide];
        WNFUSED_UNROLL for (int t = 0; t < kSide; ++t) weight[t] = _mm512_loadu_si512(bank + t * kLanes * kLanes);
        WNFUSED_UNROLL for (int g = 0; g < 2; ++g) {
          WNFUSED_UNROLL for (int i = 0; i < kGroup + kSide - 1; ++i) {
            int32_t pair;
            __builtin_memcpy(&pair, pixels[g] + i * kLanes + k, sizeof pair);
            const __m512i pairs = _mm512_set1_epi32(pair);
            WNFUSED_UNROLL for (int t = 0; t < kSide; ++t) {
              if (i - t < 0 || i - t >= kGroup) continue;
              __m512& sum = accumulator[g * kGroup + i - t];
              sum = _mm512_dpbf16_ps(sum, (__m512bh)pairs, (__m512bh)weight[t]);
            }
          }
        }
      }
    }
    WNFUSED_UNROLL for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(sums.out + r * kLanes, accumulator[r]);
    sink.ready(sums, group, 2, col, 1);
  }
};

}  // namespace wnfused::cpu::WNFUSED_ISA

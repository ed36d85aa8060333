// Products of bfloat16 matrices, two elements of the depth at a time: what the methods `lines` and `positions` are made
// of. A row is a run of bfloat16 along the depth; the other factor keeps pairs of the depth side by side:
//
//   rows [..][depth]                          bank [output block][depth / 2][16 lanes][2]
//   row r: (a0 a1) (a2 a3) ..                 pair k: (w_2k,0 w_2k+1,0) (w_2k,1 w_2k+1,1) .. 16 lanes
//               \__ one pair to all lanes  x       -> 16 floats: accumulator [r][lane] += a_2k w_2k + a_2k+1 w_2k+1
//
// Convolution: rows are pixels, the depth runs over channels and taps. Lines: the three taps of a filter's row are one
// run of 3 C elements, since neighbours lie side by side; three segments, one a row of the filter.
// Weight gradient: rows are input channels, the depth runs over pixels; a tap is a shift of the run. With tiles rows
// are output channels, the bank's lanes inputs, and a tap shifts the bank.
//
// What becomes of the sums is a Sink's business: it says where a register tile's go, and hears when they are there.
// Tiles call it after each step of the depth, too, when the rest of the processor has little to do (meanwhile).
// kFinishes: it works on them when they are there.
//
// An instruction set brings Pairs::multiply (pair_dots.h, pair_amx.h). Products and sums are fp32; denormal operands
// and results count as zero, as in the processor's own instructions.
#pragma once

#include "cpu/products/pair_shape.h"
#include "cpu/vec/vec.h"

namespace wnfused::cpu::WNFUSED_ISA {

struct PairProduct {
  const Segment* segments;
  int64_t segment_count;
  int64_t depth;        // of each segment; a multiple of PairTile::depth
  int64_t row_stride;   // elements
  int64_t bank_stride;  // elements from one output block to the next
  bool accumulate = false;  // onto what is there
  // Eight rows of a tile are shifts of one run: row r + 1 begins a third of the depth after row r. For dot products;
  // tiles pay no heed.
  bool neighbours = false;
  // Rows lie anywhere: row_offset has one entry for each, not for each group. Dot products alone can.
  bool scattered = false;
};

// Where the sums of some rows and output blocks are, or go: [output block][row][16].
struct TileSums {
  float* out;
  int64_t block_stride;         // floats
  int64_t row_stride = kLanes;  // tiles honour it
};

// TileSums that stay where they are: [output block][rows][16].
struct PlainSink {
  static constexpr bool kFinishes = false;

  float* out;
  int64_t block_stride;
  int64_t group_rows;

  WNFUSED_INLINE TileSums place(int64_t group, int64_t, int64_t col, int64_t) const {
    return {out + col * block_stride + group * group_rows * kLanes, block_stride};
  }
  WNFUSED_INLINE void meanwhile() const {}
  WNFUSED_INLINE void ready(const TileSums&, int64_t, int64_t, int64_t, int64_t) const {}
};

// Pairs of values that are bfloat16 already, as bits.
WNFUSED_INLINE Block exact_pairs(const Block& even, const Block& odd) {
  Block pairs;
  WNFUSED_FOR_PARTS pairs.part[i] = (Native)(((NativeBits)even.part[i] >> 16) | (NativeBits)odd.part[i]);
  return pairs;
}

#if defined(WNFUSED_CONVERTS_BFLOAT16)
// 16 elements and 16 more, side by side.
WNFUSED_INLINE Block in_pairs(__m512i halves) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return {(Native)_mm512_permutexvar_epi16(order, halves)};
}

// Two Blocks as 16 pairs of bfloat16, even elements of the depth in the low halves; denormals become zero.
WNFUSED_INLINE Block rounded_pairs(const Block& even, const Block& odd) {
  return in_pairs((__m512i)_mm512_cvtne2ps_pbh(odd.part[0], even.part[0]));
}

// 16 pairs of elements from memory, null for zeros.
WNFUSED_INLINE Block load_pairs(const uint16_t* even, const uint16_t* odd) {
  const __m256i low = even ? _mm256_loadu_si256((const __m256i*)even) : _mm256_setzero_si256();
  const __m256i high = odd ? _mm256_loadu_si256((const __m256i*)odd) : _mm256_setzero_si256();
  return in_pairs(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}
#else
WNFUSED_INLINE Block load_pairs(const uint16_t* even, const uint16_t* odd) {
  return exact_pairs(even ? load(even) : zero(), odd ? load(odd) : zero());
}

// Two Blocks as 16 pairs of bfloat16, even elements of the depth in the low halves.
WNFUSED_INLINE Block rounded_pairs(const Block& even, const Block& odd) {
  return exact_pairs(round_to_bfloat16(even), round_to_bfloat16(odd));
}
#endif

#if defined(WNFUSED_CONVERTS_BFLOAT16)
// 32 neighbours rounded, two to a word, as they lie in memory.
WNFUSED_INLINE Block rounded_run(const Block& first, const Block& second) {
  return {(Native)_mm512_cvtne2ps_pbh(second.part[0], first.part[0])};
}
#else
WNFUSED_INLINE Block rounded_run(const Block& first, const Block& second) {
  uint16_t entries[2 * kLanes];
  store(entries, first);
  store(entries + kLanes, second);
  Block bits;
  WNFUSED_FOR_PARTS __builtin_memcpy(&bits.part[i], entries + 2 * i * kNativeLanes, sizeof(Native));
  return bits;
}
#endif

// `sum` plus even plus odd elements.
WNFUSED_INLINE Block add_pairs(const Block& sum, const Block& pairs) {
#if defined(WNFUSED_CONVERTS_BFLOAT16)
  const __m512i ones = _mm512_set1_epi16(0x3f80);
  return {(Native)_mm512_dpbf16_ps((__m512)sum.part[0], (__m512bh)(__m512i)pairs.part[0], (__m512bh)ones)};
#else
  Block added;
  WNFUSED_FOR_PARTS {
    const NativeBits bits = (NativeBits)pairs.part[i];
    added.part[i] = sum.part[i] + ((Native)(bits << 16) + (Native)(bits & 0xffff0000u));
  }
  return added;
#endif
}

// A run of 32 bfloat16 (rounded_run): the ReLU of each, but 0 of a NaN whose sign is set.
WNFUSED_INLINE Block relu_run(const Block& run) {
  Block result;
  WNFUSED_FOR_PARTS {
    const NativeShort bits = (NativeShort)run.part[i];
    result.part[i] = (Native)(bits > 0 ? bits : NativeShort{});
  }
  return result;
}

// A gradient where the activation, a ReLU's output and so never below 0, is not 0; a NaN passes, as in torch.
WNFUSED_INLINE Block mask_run(const Block& activation, const Block& gradient) {
  Block result;
  WNFUSED_FOR_PARTS {
    const NativeShort passed = (NativeShort)activation.part[i], bits = (NativeShort)gradient.part[i];
    result.part[i] = (Native)(passed != 0 ? bits : NativeShort{});
  }
  return result;
}

// The larger ones of two runs, by their bits without the signs: infinities are larger than what is finite, and NaNs
// larger than these.
WNFUSED_INLINE Block largest_run(const Block& largest, const Block& run) {
  Block result;
  WNFUSED_FOR_PARTS {
    const NativeShort size = (NativeShort)((NativeBits)run.part[i] & 0x7fff7fffu), other = (NativeShort)largest.part[i];
    result.part[i] = (Native)(size > other ? size : other);
  }
  return result;
}

WNFUSED_INLINE bool any_beyond_finite(const Block& largest) {
  constexpr int16_t kInfinity = 0x7f80;
  NativeShort found{};
  WNFUSED_FOR_PARTS found |= (NativeShort)largest.part[i] >= kInfinity;
  int16_t entries[2 * kNativeLanes];
  __builtin_memcpy(entries, &found, sizeof entries);
  int any = 0;
  for (int16_t entry : entries) any |= entry;
  return any != 0;
}

WNFUSED_INLINE Block load_bits(const uint16_t* source) {
  Block bits;
  WNFUSED_FOR_PARTS __builtin_memcpy(&bits.part[i], source + 2 * i * kNativeLanes, sizeof(Native));
  return bits;
}

WNFUSED_INLINE void store_bits(uint16_t* target, const Block& bits) {
  WNFUSED_FOR_PARTS __builtin_memcpy(target + 2 * i * kNativeLanes, &bits.part[i], sizeof(Native));
}

WNFUSED_INLINE void store_pairs(uint16_t* target, const Block& even, const Block& odd) {
  store_bits(target, rounded_pairs(even, odd));
}

}  // namespace wnfused::cpu::WNFUSED_ISA

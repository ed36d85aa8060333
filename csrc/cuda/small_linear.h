// Linear layers of few samples, where launches, the way to memory and the weight's bytes are the time: one launch
// forward and one backward, by matrix instructions, with v read where it lies.
//
//   forward          y = act(s (x v^T) + b + r)      a block has 8 rows of v and 16 or 32 samples, and sums v's squares
//                                                    beside the product
//   input gradient   dx = (s mask dy) v              a block has 16 columns of dx and 32 samples
//   weight gradient  dw = (mask dy)^T x              a block has 8 rows of v and all samples, keeps dw in
//                    dg = <dw, v> / ||v||            registers, and writes dv and the bias's gradient, too
//                    dv = s (dw - v dg / ||v||)
//
// with s = g / ||v||, x [samples, columns] and v [rows, columns]. Each is in a file of its own beside this one;
// small_linear_backward.h has both gradients in one launch.
//
// Operands go from global memory to fragments, most of them without a stop in shared memory. In which order a product's
// entries are summed is free as long as both operands keep it, and so is which column of a tile stands for which of the
// map: a lane takes neighbouring entries, 8 to 16 bytes of them, where PTX's layout would have it pick single ones. The
// warps of a block share the sum and add their parts up in a fixed order: the same bits in every run.
//
// The way to memory takes longer than a step's products. A warp goes it for a round of several steps at once, as many
// as there are registers for: their loads all stand before the first product, and what a block needs in the end is
// asked for in the beginning. Registers are left to what is on its way: offsets have 32 bits, as small_linear_limits.h
// allows, and where a lane's entries lie is worked out again for each round (computed_again), not kept.
#pragma once

#include <cfloat>
#include <type_traits>

#include "cuda/activation.h"
#include "cuda/precision.h"
#include "cuda/small_linear_limits.h"

namespace wnfused::gpu {

// T: of v, g, dv and dg; N: of x, y and the residual. All dense, and within small_linear_limits.h.
template <class T, class N>
struct SmallLinearParams {
  const N *x, *residual, *dy;
  const N* y_read;  // backward: where an activation is to be masked
  const T *v, *g;
  const void* bias;
  N *y, *dx;
  T *dv, *dg;
  void* dbias;
  float* norm;         // written forward, read backward
  bool bias_is_float;  // bias and dbias; in N otherwise
  bool activates;
  float slope;  // of what is not positive
  int samples, rows, columns;
};

// ------------------------------------------------------------------------------------------- neighbouring entries

// kCount neighbouring entries, float32 or bfloat16, as they lie in memory, read at once. In whole registers: what is on
// its way is not to be taken apart before it is there.
template <class T, int kCount>
struct Neighbours {
  static constexpr bool kIsBfloat16 = sizeof(T) == 2;
  static constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  using Word = std::conditional_t<kBytes % 4 == 0, uint32_t, uint16_t>;
  struct alignas(kBytes < 16 ? kBytes : 16) Raw {
    Word word[kBytes / sizeof(Word)];
  };
  Raw raw;

  WNFUSED_DEVICE static Neighbours load(const T* from, bool valid) {
    return valid ? Neighbours{load_own<Raw>(from)} : Neighbours{};
  }
  WNFUSED_DEVICE static Neighbours of(const float (&values)[kCount]) {
    Neighbours made;
#pragma unroll
    for (int i = 0; i < kCount; i += kIsBfloat16 ? 2 : 1) {
      if constexpr (kIsBfloat16)
        made.raw.word[i / 2] = pack_bf16(values[i], values[i + 1]);
      else
        made.raw.word[i] = bits_of_float(values[i]);
    }
    return made;
  }
  WNFUSED_DEVICE float operator[](int i) const {
    if constexpr (kIsBfloat16) {
      const uint32_t word = raw.word[i / 2];
      return float_of_bits(i % 2 ? word & 0xffff0000u : word << 16);
    } else {
      return float_of_bits(raw.word[i]);
    }
  }
};

// ------------------------------------------------------------------------------------------------ operands by type

// Four values along the product's sum as one or two operands of a matrix instruction: what `a` wants of a row, and `b`
// of a column, beside one another. Bfloat16: one of depth 16 takes four from each of four lanes; the others: two of
// depth 8.
template <class Kind>
struct Quad;

template <>
struct Quad<Bfloat16> {
  uint32_t word[2];
  WNFUSED_DEVICE static Quad of(float a, float b, float c, float d) { return {{pack_bf16(a, b), pack_bf16(c, d)}}; }
};

template <>
struct Quad<Tf32> {
  uint32_t word[4];
  WNFUSED_DEVICE static Quad of(float a, float b, float c, float d) {
    return {{bits_of_float(round_to_tf32(a)), bits_of_float(round_to_tf32(b)), bits_of_float(round_to_tf32(c)),
             bits_of_float(round_to_tf32(d))}};
  }
};

template <>
struct Quad<Float32> {
  Float32::Fragment split;
  WNFUSED_DEVICE static Quad of(float a, float b, float c, float d) {
    const uint32_t raw[4] = {bits_of_float(a), bits_of_float(b), bits_of_float(c), bits_of_float(d)};
    return {Float32::fragment(raw)};
  }
};

// sum += a b over 16 entries: a's rows `lane / 4` (upper) and `lane / 4 + 8` (lower), b's column `lane / 4`, of which a
// lane holds the entries 4 (lane % 4) to 4 (lane % 4) + 3.
WNFUSED_DEVICE void multiply_quads(float (&sum)[4], const Quad<Bfloat16>& upper, const Quad<Bfloat16>& lower,
                                   const Quad<Bfloat16>& b) {
  const uint32_t a[4] = {upper.word[0], lower.word[0], upper.word[1], lower.word[1]};
  multiply_bf16(sum, a, b.word[0], b.word[1]);
}
WNFUSED_DEVICE void multiply_quads(float (&sum)[4], const Quad<Tf32>& upper, const Quad<Tf32>& lower,
                                   const Quad<Tf32>& b) {
#pragma unroll
  for (int half = 0; half < 4; half += 2) {
    const uint32_t a[4] = {upper.word[half], lower.word[half], upper.word[half + 1], lower.word[half + 1]};
    multiply_tf32(sum, a, b.word[half], b.word[half + 1]);
  }
}
WNFUSED_DEVICE void multiply_quads(float (&sum)[4], const Quad<Float32>& upper, const Quad<Float32>& lower,
                                   const Quad<Float32>& b) {
#pragma unroll
  for (int half = 0; half < 4; half += 2) {
    Float32::Fragment a, both;
    const auto take = [&](int i, const Float32::Fragment& from, int k) {
      a.large[i] = from.large[k];
      a.small[i] = from.small[k];
    };
    take(0, upper.split, half);
    take(1, lower.split, half);
    take(2, upper.split, half + 1);
    take(3, lower.split, half + 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      both.large[i] = b.split.large[half + i];
      both.small[i] = b.split.small[half + i];
    }
    Float32::multiply(sum, a, both, 0);
  }
}

// Entries first to first + 3 of neighbours, and of four neighbours' entry `column`. What is in bfloat16 stays as it is.
template <class Kind, class T, int kCount>
WNFUSED_DEVICE Quad<Kind> quad_of(const Neighbours<T, kCount>& entries, int first) {
  if constexpr (Kind::kIsBfloat16 && sizeof(T) == 2)
    return {{entries.raw.word[first / 2], entries.raw.word[first / 2 + 1]}};
  else
    return Quad<Kind>::of(entries[first], entries[first + 1], entries[first + 2], entries[first + 3]);
}
template <class Kind, class T, int kCount>
WNFUSED_DEVICE Quad<Kind> quad_across(const Neighbours<T, kCount> (&lines)[4], int column) {
  if constexpr (Kind::kIsBfloat16 && sizeof(T) == 2) {
    const auto pair = [&](int line) {
      const uint32_t low = lines[line].raw.word[column / 2], high = lines[line + 1].raw.word[column / 2];
      return column % 2 ? low >> 16 | (high & 0xffff0000u) : (low & 0xffffu) | high << 16;
    };
    return {{pair(0), pair(2)}};
  } else {
    return Quad<Kind>::of(lines[0][column], lines[1][column], lines[2][column], lines[3][column]);
  }
}

// ------------------------------------------------------------------------------------------------ pointwise parts

// A zero row has zero weights, also where the gain is infinite.
WNFUSED_DEVICE float row_scale(float gain, float norm) { return norm == 0.0f ? 0.0f : gain / norm; }

// mask dy at (sample, row) and the next three rows.
template <class T, class N>
struct MaskedGradient {
  Neighbours<N, 4> dy, y;
  WNFUSED_DEVICE static MaskedGradient load(const SmallLinearParams<T, N>& params, int sample, int row, bool valid) {
    const int at = sample * params.rows + row;
    return {Neighbours<N, 4>::load(params.dy + at, valid),
            Neighbours<N, 4>::load(params.y_read + at, valid && params.activates)};
  }
  WNFUSED_DEVICE float at(const SmallLinearParams<T, N>& params, int i) const {
    return masked(dy[i], y[i], params.activates ? params.slope : 1.0f);  // with no branch on `activates`
  }
};

// Sums that are not finite are taken again, by plain multiply-adds with the scaled weight, up to the first NaN: x v may
// overflow where x w does not, and in Float32 an infinity meets the other operand's small part, which may be zero or of
// the other sign.
WNFUSED_DEVICE bool is_finite(float value) { return value >= -FLT_MAX && value <= FLT_MAX; }

}  // namespace wnfused::gpu

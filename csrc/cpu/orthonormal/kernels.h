// CholeskyQR of one matrix; see orthonormal.h. Included once per instruction set, as vec.h is.
#pragma once

#include "cpu/orthonormal/orthonormal.h"
#include "cpu/vec/vec.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Rows and 16-column blocks of a register tile: 16 accumulators of one register each, or 4 of several.
constexpr int kTileRows = kParts == 1 ? 4 : 2;
constexpr int kTileBlocks = kParts == 1 ? 4 : 2;

constexpr float kUnit = 5.9604645e-8f;        // u, half a unit in the last place
constexpr float kExact = 32 * kUnit;          // as orthonormal as Householder's reflections leave rows
constexpr float kHopeless = 0.1f;             // after a first round: k^2 u is no longer small
constexpr int kRounds = 3;

// gram[j][i] = <q_i, q_j> for j <= i, with 1 on the diagonal of the padding.
WNFUSED_INLINE void gram_matrix(const OrthonormalShape& shape, const float* q, float* gram) {
  const int64_t blocks = shape.stride / kLanes;
  for (int64_t i = 0; i < shape.padded_rows; i += kTileRows) {
    for (int64_t j = 0; j <= i; j += kTileRows) {
      Block sum[kTileRows][kTileRows];
      for (auto& row : sum) for (Block& s : row) s = zero();
      for (int64_t b = 0; b < blocks; ++b) {
        Block left[kTileRows], right[kTileRows];
        WNFUSED_UNROLL for (int t = 0; t < kTileRows; ++t) left[t] = load(q + (i + t) * shape.stride + b * kLanes);
        WNFUSED_UNROLL for (int t = 0; t < kTileRows; ++t) right[t] = load(q + (j + t) * shape.stride + b * kLanes);
        WNFUSED_UNROLL for (int s = 0; s < kTileRows; ++s)
          WNFUSED_UNROLL for (int t = 0; t < kTileRows; ++t) sum[s][t] = multiply_add(left[s], right[t], sum[s][t]);
      }
      for (int s = 0; s < kTileRows; ++s)
        for (int t = 0; t < kTileRows; ++t) gram[(j + t) * shape.gram_stride + i + s] = sum_of(sum[s][t]);
    }
  }
  for (int64_t i = shape.rows; i < shape.padded_rows; ++i) gram[i * shape.gram_stride + i] = 1;
}

// gram -> U with U^T U = gram, and the inverses of its diagonal; false if gram is not positive definite.
WNFUSED_INLINE bool factorise(const OrthonormalShape& shape, float* u, float* inverse) {
  for (int64_t j = 0; j < shape.padded_rows; ++j) {
    float* pivot = u + j * shape.gram_stride;
    const float squared = pivot[j];
    if (!(squared > 0) || squared > 1e36f) return false;
    inverse[j] = 1 / __builtin_sqrtf(squared);
    const int64_t first = j / kLanes * kLanes;  // what lies left of the diagonal is never read
    for (int64_t at = first; at < shape.gram_stride; at += kLanes)
      store(pivot + at, load(pivot + at) * splat(inverse[j]));
    for (int64_t i = j + 1; i < shape.rows; ++i) {
      float* row = u + i * shape.gram_stride;
      const Block factor = splat(-pivot[i]);
      for (int64_t at = i / kLanes * kLanes; at < shape.gram_stride; at += kLanes)
        store(row + at, multiply_add(factor, load(pivot + at), load(row + at)));
    }
  }
  return true;
}

// q <- U^-T q for `kBlocks` blocks of columns.
template <int kBlocks>
WNFUSED_INLINE void substitute(const OrthonormalShape& shape, const float* u, const float* inverse, float* q) {
  for (int64_t i = 0; i < shape.padded_rows; i += kTileRows) {
    Block row[kTileRows][kBlocks];
    WNFUSED_UNROLL for (int t = 0; t < kTileRows; ++t)
      WNFUSED_UNROLL for (int b = 0; b < kBlocks; ++b) row[t][b] = load(q + (i + t) * shape.stride + b * kLanes);
    for (int64_t k = 0; k < i; ++k) {
      Block known[kBlocks];
      WNFUSED_UNROLL for (int b = 0; b < kBlocks; ++b) known[b] = load(q + k * shape.stride + b * kLanes);
      WNFUSED_UNROLL for (int t = 0; t < kTileRows; ++t) {
        const Block factor = splat(-u[k * shape.gram_stride + i + t]);
        WNFUSED_UNROLL for (int b = 0; b < kBlocks; ++b) row[t][b] = multiply_add(factor, known[b], row[t][b]);
      }
    }
    WNFUSED_UNROLL for (int t = 0; t < kTileRows; ++t) {
      WNFUSED_UNROLL for (int s = 0; s < t; ++s) {
        const Block factor = splat(-u[(i + s) * shape.gram_stride + i + t]);
        WNFUSED_UNROLL for (int b = 0; b < kBlocks; ++b) row[t][b] = multiply_add(factor, row[s][b], row[t][b]);
      }
      WNFUSED_UNROLL for (int b = 0; b < kBlocks; ++b) {
        row[t][b] = row[t][b] * splat(inverse[i + t]);
        store(q + (i + t) * shape.stride + b * kLanes, row[t][b]);
      }
    }
  }
}

// NaN if there is one.
WNFUSED_INLINE float largest_defect(const OrthonormalShape& shape, const float* gram) {
  float worst = 0;
  for (int64_t j = 0; j < shape.rows; ++j)
    for (int64_t i = j; i < shape.rows; ++i) {
      const float defect = __builtin_fabsf(gram[j * shape.gram_stride + i] - (i == j ? 1.0f : 0.0f));
      if (defect != defect) return defect;
      worst = defect > worst ? defect : worst;
    }
  return worst;
}

inline bool cholesky_qr(const OrthonormalShape& shape, float* a, float* workspace) {
  float* q = workspace;
  float* gram = q + shape.padded_rows * shape.stride;
  float* inverse = gram + shape.padded_rows * shape.gram_stride;
  for (int64_t i = 0; i < shape.padded_rows * shape.stride; ++i) q[i] = 0;
  for (int64_t i = 0; i < shape.padded_rows * shape.gram_stride; ++i) gram[i] = 0;
  for (int64_t r = 0; r < shape.rows; ++r)
    __builtin_memcpy(q + r * shape.stride, a + r * shape.columns, shape.columns * sizeof(float));
  gram_matrix(shape, q, gram);
  float defect = 1;
  for (int round = 0; round < kRounds && !(defect < kExact); ++round) {
    if (round > 0 && !(defect < kHopeless)) return false;
    if (!factorise(shape, gram, inverse)) return false;
    const int64_t blocks = shape.stride / kLanes;
    int64_t b = 0;
    for (; b + kTileBlocks <= blocks; b += kTileBlocks) substitute<kTileBlocks>(shape, gram, inverse, q + b * kLanes);
    for (; b < blocks; ++b) substitute<1>(shape, gram, inverse, q + b * kLanes);
    gram_matrix(shape, q, gram);
    defect = largest_defect(shape, gram);
  }
  if (!(defect < kExact)) return false;
  for (int64_t r = 0; r < shape.rows; ++r)
    __builtin_memcpy(a + r * shape.columns, q + r * shape.stride, shape.columns * sizeof(float));
  return true;
}

const Orthonormalise orthonormalise = cholesky_qr;

}  // namespace wnfused::cpu::WNFUSED_ISA

// Orthonormal rows of many small matrices, by CholeskyQR.
//
//      A [r][c], r <= c      A A^T = L L^T,   Q = L^-1 A,   again until |Q Q^T - I| is at rounding
//
//      q      [r'][c']       the matrix in a worker's cache, r' a multiple of 4 and c' of 16, padded by zeros
//      gram   [r'][r'']      upper triangle of A A^T, then U = L^T; r'' a multiple of 16
//
// A matrix of 64 x 576 is 147 KB and stays in L2 through all passes, each of r^2 c / 2 multiply-adds: the Gram matrix,
// the substitution, and the Gram matrix again for the check. With condition number k the first round leaves an error of
// k^2 u, so that Gaussian matrices twice as long as wide rarely need a second.
#pragma once

#include <cstdint>

namespace wnfused::cpu {

constexpr int64_t kMaxOrthonormalRows = 256;

struct OrthonormalShape {
  int64_t rows, columns;
  int64_t padded_rows, stride, gram_stride;

  OrthonormalShape(int64_t r, int64_t c)
      : rows(r),
        columns(c),
        padded_rows((r + 3) / 4 * 4),
        stride((c + 15) / 16 * 16),
        gram_stride((r + 15) / 16 * 16) {}

  int64_t workspace() const { return padded_rows * stride + padded_rows * gram_stride + padded_rows; }
};

// Replaces a [rows][columns] by Q and returns true; leaves it as it is and returns false where it is too
// ill-conditioned.
using Orthonormalise = bool (*)(const OrthonormalShape& shape, float* a, float* workspace);

namespace avx512 { extern const Orthonormalise orthonormalise; }
namespace avx2 { extern const Orthonormalise orthonormalise; }
namespace portable { extern const Orthonormalise orthonormalise; }

}  // namespace wnfused::cpu

// The functions of cuSOLVER that csrc/cuda/cusolver.h names, at once and on one thread, in double; build.py adds the rest
// that torch links, which is refused. Matrices are column-major. Methods as in Golub & Van Loan, Matrix Computations:
// Householder's reflectors (5.1), Jacobi's rotations for symmetric matrices (8.5) and one-sided ones (8.6.3).
#include <cuda_runtime_api.h>
#include <library_types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

enum Status { kSuccess = 0, kInvalidValue = 3 };

// Held by a caller; nothing of it is used.
struct Opaque {};

template <class Handle>
Status create(Handle** handle) {
  *handle = new Handle;
  return kSuccess;
}

struct Matrix {
  int64_t rows, columns;
  std::vector<double> entries;

  Matrix(int64_t rows, int64_t columns) : rows(rows), columns(columns), entries(rows * columns) {}
  template <class T>
  Matrix(const T* data, int64_t leading, int64_t rows, int64_t columns) : Matrix(rows, columns) {
    for (int64_t j = 0; j < columns; ++j) std::copy_n(data + j * leading, rows, column(j));
  }
  double* column(int64_t j) { return entries.data() + j * rows; }
  double& at(int64_t i, int64_t j) { return column(j)[i]; }
  template <class T>
  void write(T* data, int64_t leading) {
    for (int64_t j = 0; j < columns; ++j)
      for (int64_t i = 0; i < rows; ++i) data[j * leading + i] = static_cast<T>(at(i, j));
  }
};

Matrix identity(int64_t n) {
  Matrix made(n, n);
  for (int64_t i = 0; i < n; ++i) made.at(i, i) = 1;
  return made;
}

double dot(const double* x, const double* y, int64_t n) { return std::inner_product(x, x + n, y, 0.0); }

// column -= tau v (v^T column), with v = (1, tail).
void reflect(double* column, const double* tail, double tau, int64_t n) {
  const double along = tau * (column[0] + dot(column + 1, tail, n - 1));
  column[0] -= along;
  for (int64_t i = 1; i < n; ++i) column[i] -= along * tail[i - 1];
}

template <class T>
void geqrf(T* data, int64_t leading, T* tau, int64_t m, int64_t n) {
  Matrix a(data, leading, m, n);
  for (int64_t j = 0; j < std::min(m, n); ++j) {
    double* x = a.column(j) + j;
    const int64_t length = m - j;
    const double below = dot(x + 1, x + 1, length - 1);
    double scale = 0;
    if (below > 0) {
      const double beta = -std::copysign(std::sqrt(x[0] * x[0] + below), x[0]);
      scale = (beta - x[0]) / beta;
      for (int64_t i = 1; i < length; ++i) x[i] /= x[0] - beta;
      x[0] = beta;
    }
    tau[j] = static_cast<T>(scale);
    for (int64_t k = j + 1; k < n; ++k) reflect(a.column(k) + j, x + 1, scale, length);
  }
  a.write(data, leading);
}

template <class T>
Status orgqr(int m, int n, int k, T* data, int leading, const T* tau, int* info) {
  if (m < n || n < k || leading < m) return kInvalidValue;
  Matrix reflectors(data, leading, m, n), q(m, n);
  for (int64_t j = 0; j < n; ++j) {
    q.at(j, j) = 1;
    for (int64_t i = k - 1; i >= 0; --i) reflect(q.column(j) + i, reflectors.column(i) + i + 1, tau[i], m - i);
  }
  q.write(data, leading);
  *info = 0;
  return kSuccess;
}

// Turns columns p and q of `a`: (x, y) becomes (c x - s y, s x + c y).
void rotate(Matrix& a, int64_t p, int64_t q, double c, double s) {
  for (int64_t i = 0; i < a.rows; ++i) {
    const double x = a.at(i, p), y = a.at(i, q);
    a.at(i, p) = c * x - s * y;
    a.at(i, q) = s * x + c * y;
  }
}

// Of the rotation that makes the off-diagonal entry `across` of ((alpha, across), (across, beta)) zero.
std::pair<double, double> rotation(double alpha, double beta, double across) {
  const double ratio = (beta - alpha) / (2 * across);
  const double tangent = std::copysign(1.0, ratio) / (std::abs(ratio) + std::hypot(1.0, ratio));
  const double c = 1 / std::hypot(1.0, tangent);
  return {c, c * tangent};
}

constexpr int kSweeps = 60;

// One-sided: columns of `a` become orthogonal, `turned` is what they were multiplied by.
void orthogonalise(Matrix& a, Matrix& turned) {
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    bool any = false;
    for (int64_t p = 0; p < a.columns; ++p)
      for (int64_t q = p + 1; q < a.columns; ++q) {
        const double alpha = dot(a.column(p), a.column(p), a.rows), beta = dot(a.column(q), a.column(q), a.rows);
        const double across = dot(a.column(p), a.column(q), a.rows);
        if (std::abs(across) <= 1e-15 * std::sqrt(alpha * beta)) continue;
        any = true;
        const auto [c, s] = rotation(alpha, beta, across);
        rotate(a, p, q, c, s);
        rotate(turned, p, q, c, s);
      }
    if (!any) return;
  }
}

// The first `known` columns are orthonormal; the others become so, too.
void complete(Matrix& basis, int64_t known) {
  for (int64_t j = known, unit = 0; j < basis.columns; ++unit) {
    double* x = basis.column(j);
    std::fill_n(x, basis.rows, 0.0);
    x[unit % basis.rows] = 1;
    for (int twice = 0; twice < 2; ++twice)
      for (int64_t k = 0; k < j; ++k) {
        const double along = dot(x, basis.column(k), basis.rows);
        for (int64_t i = 0; i < basis.rows; ++i) x[i] -= along * basis.column(k)[i];
      }
    const double length = std::sqrt(dot(x, x, basis.rows));
    if (length < 1e-3) continue;
    for (int64_t i = 0; i < basis.rows; ++i) x[i] /= length;
    ++j;
  }
}

// a [m, n] with m >= n: its columns' lengths, from the longest, and both sets of vectors, whole.
void decompose(Matrix a, std::vector<double>& lengths, Matrix& left, Matrix& right) {
  Matrix turned = identity(a.columns);
  orthogonalise(a, turned);
  std::vector<int64_t> order(a.columns);
  std::iota(order.begin(), order.end(), 0);
  std::vector<double> found;
  for (int64_t j = 0; j < a.columns; ++j) found.push_back(std::sqrt(dot(a.column(j), a.column(j), a.rows)));
  std::stable_sort(order.begin(), order.end(), [&](int64_t p, int64_t q) { return found[p] > found[q]; });
  int64_t known = 0;
  for (int64_t j = 0; j < a.columns; ++j) {
    lengths[j] = found[order[j]];
    std::copy_n(turned.column(order[j]), a.columns, right.column(j));
    if (lengths[j] <= 1e-300) continue;
    for (int64_t i = 0; i < a.rows; ++i) left.at(i, j) = a.at(i, order[j]) / lengths[j];
    known = j + 1;
  }
  complete(left, known);
}

template <class T>
Status gesvdj(int m, int n, T* data, int lda, T* s, T* u, int ldu, T* v, int ldv, int* info, int batch) {
  if (lda < m || ldu < m || ldv < n || std::max(m, n) > 32) return kInvalidValue;
  const int fewer = std::min(m, n);
  for (int64_t number = 0; number < batch; ++number) {
    Matrix a(data + number * lda * n, lda, m, n), left(m, m), right(n, n);
    std::vector<double> values(fewer);
    if (m >= n) {
      decompose(a, values, left, right);
    } else {
      Matrix flipped(n, m);
      for (int64_t j = 0; j < n; ++j)
        for (int64_t i = 0; i < m; ++i) flipped.at(j, i) = a.at(i, j);
      decompose(flipped, values, right, left);
    }
    left.write(u + number * ldu * m, ldu);
    right.write(v + number * ldv * n, ldv);
    std::copy(values.begin(), values.end(), s + number * fewer);
    info[number] = 0;
  }
  return kSuccess;
}

// Of the lower triangle.
template <class T>
void syev(T* data, int64_t leading, T* values, int64_t n) {
  Matrix a(data, leading, n, n), turned = identity(n);
  for (int64_t j = 0; j < n; ++j)
    for (int64_t i = 0; i < j; ++i) a.at(i, j) = a.at(j, i);
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    double apart = 0, size = 0;
    for (int64_t p = 0; p < n; ++p)
      for (int64_t q = 0; q < n; ++q) (p == q ? size : apart) += a.at(p, q) * a.at(p, q);
    if (apart <= 1e-31 * size) break;
    for (int64_t p = 0; p < n; ++p)
      for (int64_t q = p + 1; q < n; ++q) {
        if (a.at(p, q) == 0) continue;
        const auto [c, s] = rotation(a.at(p, p), a.at(q, q), a.at(p, q));
        rotate(a, p, q, c, s);
        rotate(turned, p, q, c, s);
        for (int64_t j = 0; j < n; ++j) {
          const double x = a.at(p, j), y = a.at(q, j);
          a.at(p, j) = c * x - s * y;
          a.at(q, j) = s * x + c * y;
        }
      }
  }
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t p, int64_t q) { return a.at(p, p) < a.at(q, q); });
  for (int64_t j = 0; j < n; ++j) {
    values[j] = static_cast<T>(a.at(order[j], order[j]));
    for (int64_t i = 0; i < n; ++i) data[j * leading + i] = static_cast<T>(turned.at(i, order[j]));
  }
}

}  // namespace

API int cusolverDnCreate(Opaque** handle) { return create(handle); }
API int cusolverDnSetStream(Opaque*, cudaStream_t) { return kSuccess; }
API int cusolverDnCreateParams(Opaque** parameters) { return create(parameters); }

API int cusolverDnXgeqrf_bufferSize(Opaque*, Opaque*, int64_t, int64_t n, cudaDataType, const void*, int64_t,
                                    cudaDataType, const void*, cudaDataType, size_t* device, size_t* host) {
  *device = *host = 8 * n;
  return kSuccess;
}
API int cusolverDnXgeqrf(Opaque*, Opaque*, int64_t m, int64_t n, cudaDataType type, void* a, int64_t leading,
                         cudaDataType, void* tau, cudaDataType, void*, size_t device, void*, size_t host, int* info) {
  if (leading < m || device < 8 * static_cast<size_t>(n) || host < 8 * static_cast<size_t>(n)) return kInvalidValue;
  if (type == CUDA_R_32F)
    geqrf(static_cast<float*>(a), leading, static_cast<float*>(tau), m, n);
  else
    geqrf(static_cast<double*>(a), leading, static_cast<double*>(tau), m, n);
  *info = 0;
  return kSuccess;
}
API int cusolverDnSorgqr_bufferSize(Opaque*, int, int n, int, const float*, int, const float*, int* size) {
  return *size = n, kSuccess;
}
API int cusolverDnDorgqr_bufferSize(Opaque*, int, int n, int, const double*, int, const double*, int* size) {
  return *size = n, kSuccess;
}
API int cusolverDnSorgqr(Opaque*, int m, int n, int k, float* a, int leading, const float* tau, float*, int size,
                         int* info) {
  return size < n ? kInvalidValue : orgqr(m, n, k, a, leading, tau, info);
}
API int cusolverDnDorgqr(Opaque*, int m, int n, int k, double* a, int leading, const double* tau, double*, int size,
                         int* info) {
  return size < n ? kInvalidValue : orgqr(m, n, k, a, leading, tau, info);
}

API int cusolverDnXsyevBatched_bufferSize(Opaque*, Opaque*, int, int, int64_t n, cudaDataType, const void*, int64_t,
                                          cudaDataType, const void*, cudaDataType, size_t* device, size_t* host,
                                          int64_t) {
  *device = *host = 8 * n;
  return kSuccess;
}
API int cusolverDnXsyevBatched(Opaque*, Opaque*, int mode, int triangle, int64_t n, cudaDataType type, void* a,
                               int64_t leading, cudaDataType, void* values, cudaDataType, void*, size_t device, void*,
                               size_t host, int* info, int64_t batch) {
  const size_t least = 8 * static_cast<size_t>(n);
  if (mode != 1 || triangle != 0 || leading < n || device < least || host < least) return kInvalidValue;
  for (int64_t number = 0; number < batch; ++number) {
    if (type == CUDA_R_32F)
      syev(static_cast<float*>(a) + number * leading * n, leading, static_cast<float*>(values) + number * n, n);
    else
      syev(static_cast<double*>(a) + number * leading * n, leading, static_cast<double*>(values) + number * n, n);
    info[number] = 0;
  }
  return kSuccess;
}

API int cusolverDnCreateGesvdjInfo(Opaque** options) { return create(options); }
API int cusolverDnDestroyGesvdjInfo(Opaque* options) {
  delete options;
  return kSuccess;
}
API int cusolverDnXgesvdjSetTolerance(Opaque*, double) { return kSuccess; }
API int cusolverDnXgesvdjSetSortEig(Opaque*, int descending) { return descending ? kSuccess : kInvalidValue; }
API int cusolverDnSgesvdjBatched_bufferSize(Opaque*, int, int m, int, const float*, int, const float*, const float*,
                                            int, const float*, int, int* size, Opaque*, int batch) {
  return *size = m * batch, kSuccess;
}
API int cusolverDnDgesvdjBatched_bufferSize(Opaque*, int, int m, int, const double*, int, const double*, const double*,
                                            int, const double*, int, int* size, Opaque*, int batch) {
  return *size = m * batch, kSuccess;
}
API int cusolverDnSgesvdjBatched(Opaque*, int mode, int m, int n, float* a, int lda, float* s, float* u, int ldu,
                                 float* v, int ldv, float*, int size, int* info, Opaque*, int batch) {
  return mode != 1 || size < m * batch ? kInvalidValue : gesvdj(m, n, a, lda, s, u, ldu, v, ldv, info, batch);
}
API int cusolverDnDgesvdjBatched(Opaque*, int mode, int m, int n, double* a, int lda, double* s, double* u, int ldu,
                                 double* v, int ldv, double*, int size, int* info, Opaque*, int batch) {
  return mode != 1 || size < m * batch ? kInvalidValue : gesvdj(m, n, a, lda, s, u, ldu, v, ldv, info, batch);
}

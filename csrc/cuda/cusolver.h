// The few functions of cuSOLVER that are used here, opened at run time: torch has its copy loaded, which may not be the
// toolkit's, and a build needs neither its headers nor its library. Types, values and prototypes are those of
// cusolverDn.h and cublas_api.h in cuSOLVER 12.0.4 (CUDA 13.0); 11.7.1 (CUDA 12.6.2), with which syevBatched came, and
// 12.4.1 have the same. tests/test_cusolver.py compiles them against a cusolverDn.h where it finds one.
//
// Matrices are column-major: what is [r, c] in torch is its transpose [c, r] here, with leading dimension c.
#pragma once

#include <cuda_runtime.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/torch.h"

namespace wnfused::gpu::cusolver {

struct DenseContext;  // cusolverDnContext
struct Parameters;    // cusolverDnParams
struct Jacobi;        // gesvdjInfo
using Handle = DenseContext*;

enum class Status : int { kSuccess = 0, kAllocFailed = 2 };  // cusolverStatus_t
enum class EigenMode : int { kValues = 0, kVectors = 1 };  // cusolverEigMode_t
enum class Triangle : int { kLower = 0, kUpper = 1 };      // cublasFillMode_t

using Create = Status(Handle* handle);
using Destroy = Status(Handle handle);
using SetStream = Status(Handle handle, cudaStream_t stream);
using CreateParameters = Status(Parameters** parameters);

// A = Q R of m x n: R in and above the diagonal, Q as n reflectors below it and in tau.
using GeqrfSize = Status(Handle handle, Parameters* parameters, int64_t m, int64_t n, cudaDataType type_a,
                         const void* a, int64_t lda, cudaDataType type_tau, const void* tau, cudaDataType compute,
                         size_t* device_bytes, size_t* host_bytes);
using Geqrf = Status(Handle handle, Parameters* parameters, int64_t m, int64_t n, cudaDataType type_a, void* a,
                     int64_t lda, cudaDataType type_tau, void* tau, cudaDataType compute, void* device_work,
                     size_t device_bytes, void* host_work, size_t host_bytes, int* info);

// The first n columns of the product of k reflectors, in their place; `size` counts numbers, not bytes.
template <class T>
using OrgqrSize = Status(Handle handle, int m, int n, int k, const T* a, int lda, const T* tau, int* size);
template <class T>
using Orgqr = Status(Handle handle, int m, int n, int k, T* a, int lda, const T* tau, T* work, int size, int* info);

// Eigenvalues w [batch, n], ascending, and eigenvectors, in the place of the symmetric matrices a [batch, n, n].
using SyevBatchedSize = Status(Handle handle, Parameters* parameters, EigenMode mode, Triangle triangle, int64_t n,
                               cudaDataType type_a, const void* a, int64_t lda, cudaDataType type_w, const void* w,
                               cudaDataType compute, size_t* device_bytes, size_t* host_bytes, int64_t batch);
using SyevBatched = Status(Handle handle, Parameters* parameters, EigenMode mode, Triangle triangle, int64_t n,
                           cudaDataType type_a, void* a, int64_t lda, cudaDataType type_w, void* w,
                           cudaDataType compute, void* device_work, size_t device_bytes, void* host_work,
                           size_t host_bytes, int* info, int64_t batch);

// A = U diag(s) V^T of many matrices [batch, n, m] of at most 32 rows and columns, by Jacobi's rotations: U [batch, m,
// m] and V [batch, n, n], columns as rows of memory, and s [batch, min(m, n)]; `size` counts numbers, not bytes.
using CreateJacobi = Status(Jacobi** jacobi);
using DestroyJacobi = Status(Jacobi* jacobi);
using SetTolerance = Status(Jacobi* jacobi, double tolerance);
using SetSort = Status(Jacobi* jacobi, int descending);
template <class T>
using GesvdjBatchedSize = Status(Handle handle, EigenMode mode, int m, int n, const T* a, int lda, const T* s,
                                 const T* u, int ldu, const T* v, int ldv, int* size, Jacobi* jacobi, int batch);
template <class T>
using GesvdjBatched = Status(Handle handle, EigenMode mode, int m, int n, T* a, int lda, T* s, T* u, int ldu, T* v,
                             int ldv, T* work, int size, int* info, Jacobi* jacobi, int batch);

struct Library {
  Create* create;
  Destroy* destroy;
  SetStream* set_stream;
  CreateParameters* create_parameters;
  GeqrfSize* geqrf_size;
  Geqrf* geqrf;
  OrgqrSize<float>* sorgqr_size;
  Orgqr<float>* sorgqr;
  OrgqrSize<double>* dorgqr_size;
  Orgqr<double>* dorgqr;
  SyevBatchedSize* syev_batched_size;
  SyevBatched* syev_batched;
  CreateJacobi* create_jacobi;
  DestroyJacobi* destroy_jacobi;
  SetTolerance* set_tolerance;
  SetSort* set_sort;
  GesvdjBatchedSize<float>* sgesvdj_batched_size;
  GesvdjBatched<float>* sgesvdj_batched;
  GesvdjBatchedSize<double>* dgesvdj_batched_size;
  GesvdjBatched<double>* dgesvdj_batched;

  // Why there is no QR decomposition, no batched eigensolver or no batched SVD; empty where there is.
  std::string no_qr, no_eigh, no_svd;
};

// Opened at the first call, for good; where that fails the next one tries again, since torch may have loaded it by
// then. What a failure returns holds until this thread's next call.
const Library& library();

struct Solver {
  Handle handle;
  Parameters* parameters;
};

// This thread's on the current device `device`, with its work on `queue`.
Solver solver_on(int device, cudaStream_t queue);

void check(Status status, const char* function);

// Workspaces, from torch's allocators.
Tensor device_bytes(const Tensor& device, size_t count);
Tensor host_bytes(size_t count);

template <class T>
constexpr cudaDataType data_type() {
  return sizeof(T) == 4 ? CUDA_R_32F : CUDA_R_64F;
}

}  // namespace wnfused::gpu::cusolver

// Orthonormal rows of matrices on a CUDA device by Householder's QR, matrix by matrix: for those that fill it alone.
//
// A [r, c] in rows is A^T [c, r] in columns, so A^T = Q R puts Q^T, the orthonormal rows, where A was: nothing is
// transposed or copied. All decompositions go first, then the signs of the diagonals of R are kept, which orgqr
// overwrites, and at last the rows of negative sign are turned, which makes the diagonals positive.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "cuda/cusolver.h"
#include "cuda/target.h"
#include "cuda/torch.h"
#include "ops.h"

namespace wnfused::gpu {
namespace {

// matrices [count, rows, columns]; negative [count * rows]; info [2, count]: of the decomposition, of forming Q.
template <class T>
struct SignParams {
  T* matrices;
  bool* negative;
  const int* info;
  bool* solved;
  int64_t count, rows, columns;
};

// Thread by thread, a diagonal entry each.
template <class T>
struct KeepSignsKernel {
  using Params = SignParams<T>;
  static constexpr int kThreads = 256, kSharedBytes = 0, kBlocksPerMultiprocessor = 1;

  WNFUSED_DEVICE static void run(const Params& params, char*) {
    const int64_t row = int64_t{block_index()} * kThreads + thread_index();
    if (row >= params.count * params.rows) return;
    params.negative[row] = params.matrices[row * params.columns + row % params.rows] < T(0);
  }
};

// Block by block, a row each.
template <class T>
struct TurnRowsKernel {
  using Params = SignParams<T>;
  static constexpr int kThreads = 256, kSharedBytes = 0, kBlocksPerMultiprocessor = 1;

  WNFUSED_DEVICE static void run(const Params& params, char*) {
    const int64_t row = block_index();
    if (row < params.count && thread_index() == 0)
      params.solved[row] = params.info[row] == 0 && params.info[params.count + row] == 0;
    if (!params.negative[row]) return;
    T* values = params.matrices + row * params.columns;
    for (int64_t i = thread_index(); i < params.columns; i += kThreads) values[i] = -values[i];
  }
};

template <class T>
void orthonormalise(Tensor& a, Tensor& solved, cudaStream_t queue) {
  const cusolver::Library& library = cusolver::library();
  const cusolver::Solver solver = cusolver::solver_on(a.get_device_index(), queue);
  const int64_t count = a.size(0), rows = a.size(1), columns = a.size(2);
  const int m = static_cast<int>(columns), n = static_cast<int>(rows);
  const cudaDataType type = cusolver::data_type<T>();
  const auto [orgqr_size, orgqr] = [&] {
    if constexpr (sizeof(T) == 4)
      return std::pair(library.sorgqr_size, library.sorgqr);
    else
      return std::pair(library.dorgqr_size, library.dorgqr);
  }();

  T* matrices = static_cast<T*>(a.mutable_data_ptr());
  const Tensor reflectors = empty_like_on(a, {count, rows}, a.scalar_type());
  const Tensor statuses = empty_like_on(a, {2, count}, ScalarType::Int);
  const Tensor negative = empty_like_on(a, {count, rows}, ScalarType::Bool);
  T* tau = static_cast<T*>(reflectors.mutable_data_ptr());
  int* info = static_cast<int*>(statuses.mutable_data_ptr());

  size_t geqrf_bytes = 0, host_bytes = 0;
  int orgqr_entries = 0;
  cusolver::check(library.geqrf_size(solver.handle, solver.parameters, m, n, type, matrices, m, type, tau, type,
                                     &geqrf_bytes, &host_bytes),
                  "cusolverDnXgeqrf_bufferSize");
  cusolver::check(orgqr_size(solver.handle, m, n, n, matrices, m, tau, &orgqr_entries), "cusolverDnorgqr_bufferSize");
  const Tensor work = cusolver::device_bytes(a, std::max(geqrf_bytes, orgqr_entries * sizeof(T)));
  const Tensor host_work = cusolver::host_bytes(host_bytes);

  for (int64_t i = 0; i < count; ++i)
    cusolver::check(library.geqrf(solver.handle, solver.parameters, m, n, type, matrices + i * rows * columns, m, type,
                                  tau + i * rows, type, work.mutable_data_ptr(), geqrf_bytes,
                                  host_work.mutable_data_ptr(), host_bytes, info + i),
                    "cusolverDnXgeqrf");
  const SignParams<T> signs{matrices, static_cast<bool*>(negative.mutable_data_ptr()), info,
                            static_cast<bool*>(solved.mutable_data_ptr()), count, rows, columns};
  const int64_t threads = KeepSignsKernel<T>::kThreads;
  check(launch<KeepSignsKernel<T>>(signs, (count * rows + threads - 1) / threads, queue));
  for (int64_t i = 0; i < count; ++i)
    cusolver::check(orgqr(solver.handle, m, n, n, matrices + i * rows * columns, m, tau + i * rows,
                          static_cast<T*>(work.mutable_data_ptr()), orgqr_entries, info + count + i),
                    "cusolverDnorgqr");
  check(launch<TurnRowsKernel<T>>(signs, count * rows, queue));
}

Tensor orthonormal_rows_(Tensor a) {
  STD_TORCH_CHECK(a.dim() == 3 && a.is_contiguous(), "orthonormal_rows_: expects a contiguous [n, r, c]");
  const ScalarType dtype = a.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double,
                  "orthonormal_rows_: expects float32 or float64");
  const int64_t count = a.size(0), rows = a.size(1), columns = a.size(2);
  STD_TORCH_CHECK(rows >= 1 && rows <= columns && columns <= std::numeric_limits<int>::max() &&
                      count * rows <= std::numeric_limits<int>::max(),
                  "orthonormal_rows_: cannot take ", count, " matrices of ", rows, " rows of ", columns);
  STD_TORCH_CHECK(cusolver::library().no_qr.empty(), "orthonormal_rows_: ", cusolver::library().no_qr);
  const OnDevice here(a);
  Tensor solved = empty_like_on(a, {count}, ScalarType::Bool);
  if (count == 0) return solved;
  if (dtype == ScalarType::Float)
    orthonormalise<float>(a, solved, here.queue);
  else
    orthonormalise<double>(a, solved, here.queue);
  return solved;
}

}  // namespace
}  // namespace wnfused::gpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CUDA, m) {
  m.impl("orthonormal_rows_", TORCH_BOX(&wnfused::gpu::orthonormal_rows_));
}

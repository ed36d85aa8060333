// Singular values and vectors of many small matrices on a CUDA device, all in one call of cuSOLVER.
//
// A [r, c] in rows is A^T [c, r] in columns, and A^T = U' S V'^T is A = V' S U'^T: nothing is transposed or copied, the
// library's V' holds the left vectors as rows of memory, its U' the right ones.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <tuple>
#include <utility>

#include "cuda/cusolver.h"
#include "cuda/torch.h"
#include "ops.h"

namespace wnfused::gpu {
namespace {

constexpr int64_t kMostRows = 32;           // the library's own limit, of rows and of columns
constexpr int64_t kMostMatrices = 1 << 15;  // go together: the library's workspace grows with them

struct Destroy {
  void operator()(cusolver::Jacobi* options) const { cusolver::library().destroy_jacobi(options); }
};

// How exact the rotations are to be, and in which order the values come: read by the call, not by what it launches.
std::unique_ptr<cusolver::Jacobi, Destroy> jacobi_options(double tolerance) {
  const cusolver::Library& library = cusolver::library();
  cusolver::Jacobi* created = nullptr;
  cusolver::check(library.create_jacobi(&created), "cusolverDnCreateGesvdjInfo");
  std::unique_ptr<cusolver::Jacobi, Destroy> options(created);
  cusolver::check(library.set_tolerance(options.get(), tolerance), "cusolverDnXgesvdjSetTolerance");
  cusolver::check(library.set_sort(options.get(), 1), "cusolverDnXgesvdjSetSortEig");
  return options;
}

template <class T>
void decompose(T* a, T* values, T* left, T* right, int* info, int64_t count, int64_t rows, int64_t columns,
               const Tensor& device, cudaStream_t queue) {
  const cusolver::Library& library = cusolver::library();
  const cusolver::Handle handle = cusolver::solver_on(device.get_device_index(), queue).handle;
  const auto [size_of, run] = [&] {
    if constexpr (sizeof(T) == 4)
      return std::pair(library.sgesvdj_batched_size, library.sgesvdj_batched);
    else
      return std::pair(library.dgesvdj_batched_size, library.dgesvdj_batched);
  }();
  const auto options = jacobi_options(std::numeric_limits<T>::epsilon());
  const auto mode = cusolver::EigenMode::kVectors;
  const int m = static_cast<int>(columns), n = static_cast<int>(rows), batch = static_cast<int>(count);
  int size = 0;
  cusolver::check(size_of(handle, mode, m, n, a, m, values, right, m, left, n, &size, options.get(), batch),
                  "cusolverDngesvdjBatched_bufferSize");
  const Tensor work = cusolver::device_bytes(device, size * sizeof(T));
  cusolver::check(run(handle, mode, m, n, a, m, values, right, m, left, n, static_cast<T*>(work.mutable_data_ptr()),
                      size, info, options.get(), batch),
                  "cusolverDngesvdjBatched");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> svd_(Tensor a) {
  STD_TORCH_CHECK(a.dim() == 3 && a.is_contiguous(), "cuda_svd_: expects a contiguous [count, r, c]");
  const ScalarType dtype = a.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double, "cuda_svd_: expects float32 or float64");
  const int64_t count = a.size(0), rows = a.size(1), columns = a.size(2), fewer = std::min(rows, columns);
  STD_TORCH_CHECK(fewer >= 1 && std::max(rows, columns) <= kMostRows, "cuda_svd_: cannot take matrices of ", rows,
                  " rows of ", columns);
  STD_TORCH_CHECK(cusolver::library().no_svd.empty(), "cuda_svd_: ", cusolver::library().no_svd);
  const OnDevice here(a);
  Tensor values = empty_like_on(a, {count, fewer}, dtype), info = empty_like_on(a, {count}, ScalarType::Int);
  Tensor left = empty_like_on(a, {count, rows, rows}, dtype),
         right = empty_like_on(a, {count, columns, columns}, dtype);
  const auto typed = [&](auto value) {
    using T = decltype(value);
    const auto from = [](const Tensor& tensor, int64_t place) {
      return static_cast<T*>(tensor.mutable_data_ptr()) + place;
    };
    for (int64_t i = 0; i < count; i += kMostMatrices)
      decompose(from(a, i * rows * columns), from(values, i * fewer), from(left, i * rows * rows),
                from(right, i * columns * columns), static_cast<int*>(info.mutable_data_ptr()) + i,
                std::min(kMostMatrices, count - i), rows, columns, a, here.queue);
  };
  if (dtype == ScalarType::Float)
    typed(float{});
  else
    typed(double{});
  return {left, values, right, info};
}

}  // namespace
}  // namespace wnfused::gpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CUDA, m) { m.impl("cuda_svd_", TORCH_BOX(&wnfused::gpu::svd_)); }

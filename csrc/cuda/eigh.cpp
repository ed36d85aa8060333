// Eigenvalues and eigenvectors of many symmetric matrices on a CUDA device, all in one call of cuSOLVER.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "cuda/cusolver.h"
#include "cuda/torch.h"
#include "ops.h"

namespace wnfused::gpu {
namespace {

// So many matrices and entries go together: the library's workspace grows with both, and beyond about 32,000 matrices
// it answers CUSOLVER_STATUS_INVALID_VALUE, whatever their size.
constexpr int64_t kMostMatrices = 1 << 14, kMostEntries = 1 << 24;

template <class T>
void decompose(T* a, T* values, int* info, int64_t count, int64_t n, const Tensor& device, cudaStream_t queue) {
  const cusolver::Library& library = cusolver::library();
  const cusolver::Solver solver = cusolver::solver_on(device.get_device_index(), queue);
  const cudaDataType type = cusolver::data_type<T>();
  const auto mode = cusolver::EigenMode::kVectors;
  const auto triangle = cusolver::Triangle::kLower;
  size_t device_bytes = 0, host_bytes = 0;
  cusolver::check(library.syev_batched_size(solver.handle, solver.parameters, mode, triangle, n, type, a, n, type,
                                            values, type, &device_bytes, &host_bytes, count),
                  "cusolverDnXsyevBatched_bufferSize");
  const Tensor work = cusolver::device_bytes(device, device_bytes), host_work = cusolver::host_bytes(host_bytes);
  cusolver::check(library.syev_batched(solver.handle, solver.parameters, mode, triangle, n, type, a, n, type, values,
                                       type, work.mutable_data_ptr(), device_bytes, host_work.mutable_data_ptr(),
                                       host_bytes, info, count),
                  "cusolverDnXsyevBatched");
}

std::tuple<Tensor, Tensor> eigh_(Tensor a) {
  STD_TORCH_CHECK(a.dim() == 3 && a.size(1) == a.size(2) && a.is_contiguous(),
                  "cuda_eigh_: expects a contiguous [count, n, n]");
  const ScalarType dtype = a.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double, "cuda_eigh_: expects float32 or float64");
  STD_TORCH_CHECK(cusolver::library().no_eigh.empty(), "cuda_eigh_: ", cusolver::library().no_eigh);
  const OnDevice here(a);
  const int64_t count = a.size(0), n = a.size(1);
  Tensor values = empty_like_on(a, {count, n}, dtype), info = empty_like_on(a, {count}, ScalarType::Int);
  if (n == 0) return {values, torch::stable::zero_(info)};
  const int64_t together = std::clamp<int64_t>(kMostEntries / (n * n), 1, kMostMatrices);
  const auto typed = [&](auto value) {
    using T = decltype(value);
    for (int64_t i = 0; i < count; i += together)
      decompose(static_cast<T*>(a.mutable_data_ptr()) + i * n * n, static_cast<T*>(values.mutable_data_ptr()) + i * n,
                static_cast<int*>(info.mutable_data_ptr()) + i, std::min(together, count - i), n, a, here.queue);
  };
  if (dtype == ScalarType::Float)
    typed(float{});
  else
    typed(double{});
  return {values, info};
}

}  // namespace
}  // namespace wnfused::gpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CUDA, m) { m.impl("cuda_eigh_", TORCH_BOX(&wnfused::gpu::eigh_)); }

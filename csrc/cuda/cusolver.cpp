// Opens cuSOLVER and keeps its handles: one for each device and thread.
#include "cuda/cusolver.h"

#include <dlfcn.h>
#include <torch/csrc/stable/library.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

namespace wnfused::gpu::cusolver {
namespace {

constexpr const char* kName = CUDART_VERSION >= 13000 ? "libcusolver.so.12" : "libcusolver.so.11";

Library opened() {
  Library library{};
  void* file = dlopen(kName, RTLD_NOW | RTLD_NOLOAD);
  if (!file) file = dlopen(kName, RTLD_NOW);
  if (!file) {
    const char* error = dlerror();
    library.no_qr = library.no_eigh = library.no_svd =
        std::string("cuSOLVER does not load: ") + (error ? error : kName);
    return library;
  }
  const auto find = [file](auto*& function, const char* name, std::string& reason) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(file, name));
    if (!function && reason.empty()) reason = std::string(kName) + " has no function " + name;
  };
  std::string none;
  find(library.create, "cusolverDnCreate", none);
  find(library.destroy, "cusolverDnDestroy", none);
  find(library.set_stream, "cusolverDnSetStream", none);
  find(library.create_parameters, "cusolverDnCreateParams", none);
  library.no_qr = library.no_eigh = library.no_svd = none;
  find(library.geqrf_size, "cusolverDnXgeqrf_bufferSize", library.no_qr);
  find(library.geqrf, "cusolverDnXgeqrf", library.no_qr);
  find(library.sorgqr_size, "cusolverDnSorgqr_bufferSize", library.no_qr);
  find(library.sorgqr, "cusolverDnSorgqr", library.no_qr);
  find(library.dorgqr_size, "cusolverDnDorgqr_bufferSize", library.no_qr);
  find(library.dorgqr, "cusolverDnDorgqr", library.no_qr);
  find(library.syev_batched_size, "cusolverDnXsyevBatched_bufferSize", library.no_eigh);
  find(library.syev_batched, "cusolverDnXsyevBatched", library.no_eigh);
  find(library.create_jacobi, "cusolverDnCreateGesvdjInfo", library.no_svd);
  find(library.destroy_jacobi, "cusolverDnDestroyGesvdjInfo", library.no_svd);
  find(library.set_tolerance, "cusolverDnXgesvdjSetTolerance", library.no_svd);
  find(library.set_sort, "cusolverDnXgesvdjSetSortEig", library.no_svd);
  find(library.sgesvdj_batched_size, "cusolverDnSgesvdjBatched_bufferSize", library.no_svd);
  find(library.sgesvdj_batched, "cusolverDnSgesvdjBatched", library.no_svd);
  find(library.dgesvdj_batched_size, "cusolverDnDgesvdjBatched_bufferSize", library.no_svd);
  find(library.dgesvdj_batched, "cusolverDnDgesvdjBatched", library.no_svd);
  return library;
}

// Solvers of threads that have ended, for those to come. Never destroyed: when the process ends, the driver may have
// gone before, and destroying a handle would call it.
struct Idle {
  std::mutex mutex;
  std::map<int, std::vector<Solver>> of_device;
};

Idle& idle() {
  static Idle* kept = new Idle;
  return *kept;
}

Solver make(int device) {
  {
    const std::lock_guard<std::mutex> lock(idle().mutex);
    std::vector<Solver>& left = idle().of_device[device];
    if (!left.empty()) {
      const Solver solver = left.back();
      left.pop_back();
      return solver;
    }
  }
  Solver solver{};
  check(library().create(&solver.handle), "cusolverDnCreate");
  std::unique_ptr<DenseContext, Destroy*> owner(solver.handle, library().destroy);  // until there are parameters, too
  check(library().create_parameters(&solver.parameters), "cusolverDnCreateParams");
  owner.release();
  return solver;
}

struct OfThread {
  std::map<int, Solver> of_device;

  ~OfThread() {
    const std::lock_guard<std::mutex> lock(idle().mutex);
    for (const auto& [device, solver] : of_device) idle().of_device[device].push_back(solver);
  }
};

std::string missing(std::string function) {
  STD_TORCH_CHECK(function == "qr" || function == "eigh" || function == "svd", "cusolver_missing: unknown function ",
                  function);
  return function == "qr" ? library().no_qr : function == "eigh" ? library().no_eigh : library().no_svd;
}

}  // namespace

const Library& library() {
  static std::atomic<const Library*> kept{nullptr};
  if (const Library* found = kept.load(std::memory_order_acquire)) return *found;
  thread_local Library tried;
  tried = opened();
  if (!tried.create) return tried;
  // Two threads may both come here, with the same functions.
  const Library* found = new Library(tried);
  kept.store(found, std::memory_order_release);
  return *found;
}

Solver solver_on(int device, cudaStream_t queue) {
  thread_local OfThread own;
  auto found = own.of_device.find(device);
  if (found == own.of_device.end()) found = own.of_device.emplace(device, make(device)).first;
  check(library().set_stream(found->second.handle, queue), "cusolverDnSetStream");
  return found->second;
}

void check(Status status, const char* function) {
  STD_TORCH_CHECK(status != Status::kAllocFailed, function, " failed: out of memory");  // as CUDA's own error says it
  STD_TORCH_CHECK(status == Status::kSuccess, function, " failed with cuSOLVER's status ", static_cast<int>(status));
}

Tensor device_bytes(const Tensor& device, size_t count) {
  return empty_like_on(device, {static_cast<int64_t>(count)}, ScalarType::Byte);
}

Tensor host_bytes(size_t count) {
  const int64_t size = static_cast<int64_t>(count);
  return torch::stable::empty({&size, 1}, ScalarType::Byte, std::nullopt,
                              torch::stable::Device(torch::headeronly::DeviceType::CPU));
}

}  // namespace wnfused::gpu::cusolver

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CompositeExplicitAutograd, m) {
  m.impl("cusolver_missing", TORCH_BOX(&wnfused::gpu::cusolver::missing));
}

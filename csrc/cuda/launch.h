// A kernel is a struct with its `Params`, how many `kThreads` and `kSharedBytes` a block has, how many blocks should
// fit a multiprocessor, and `run(params, shared)`. This is how nvcc's build launches one.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "cuda/cluster.h"

namespace wnfused::gpu {

using Queue = cudaStream_t;
using Status = cudaError_t;

// The size of its shared memory is part of a kernel's name, by which the offline gate knows it.
template <class Kernel, int kSharedBytes = Kernel::kSharedBytes>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocksPerMultiprocessor)
    run_kernel(const __grid_constant__ typename Kernel::Params params) {
  extern __shared__ __align__(128) char shared[];
  Kernel::run(params, shared);
}

// Launches `blocks` blocks on the current device, and as many more as fill the last cluster. More than 48 KB of shared
// memory has to be asked for, once a device. The status is this launch's own: cudaGetLastError after it would also
// bring up what an earlier call, whose error was reported then, had left there.
template <class Kernel>
Status launch(const typename Kernel::Params& params, int64_t blocks, Queue queue) {
  if (blocks == 0) return cudaSuccess;
  const int64_t grid = grid_of<Kernel>(blocks);
  if (grid > kMostBlocks) return cudaErrorInvalidConfiguration;
  if (Kernel::kSharedBytes > 48 * 1024) {
    static std::atomic<uint64_t> prepared{0};
    int device = 0;
    Status status = cudaGetDevice(&device);
    if (status != cudaSuccess) return status;
    const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
    if (!(prepared.load(std::memory_order_relaxed) & bit)) {
      status = cudaFuncSetAttribute(run_kernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    Kernel::kSharedBytes);
      if (status != cudaSuccess) return status;
      prepared.fetch_or(bit, std::memory_order_relaxed);
    }
  }
  constexpr int kCluster = kClusterOf<Kernel>;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(Kernel::kThreads);
  config.dynamicSmemBytes = Kernel::kSharedBytes;
  config.stream = queue;
  config.attrs = &cluster;
  config.numAttrs = kCluster > 1;
  return cudaLaunchKernelEx(&config, run_kernel<Kernel>, params);
}

// How many of the kernel's clusters run at once on the current device.
template <class Kernel>
Status active_clusters(int* count) {
  const Status status =
      cudaFuncSetAttribute(run_kernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::kSharedBytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kClusterOf<Kernel>, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kClusterOf<Kernel>);
  config.blockDim = dim3(Kernel::kThreads);
  config.dynamicSmemBytes = Kernel::kSharedBytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(count, run_kernel<Kernel>, &config);
}

}  // namespace wnfused::gpu

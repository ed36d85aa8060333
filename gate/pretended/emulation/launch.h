// How a pretended GPU launches a kernel of csrc/cuda: at once, on the emulated machine, with all allocations of the
// devices for its global memory. On a stream that is being recorded the graph runs it again at each replay.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/cluster.h"
#include "emulation/machine.h"

// Of runtime.cpp.
extern "C" void pretended_arrays(void (*each)(void* to, const char* data, size_t bytes), void* to);
extern "C" void pretended_record(cudaStream_t stream, void (*call)(void* what), void* what);
extern "C" int pretended_shapes_only();

namespace wnfused::gpu {

using Queue = cudaStream_t;
using Status = cudaError_t;

inline std::mutex one_machine;

template <class Kernel>
Status run_now(const typename Kernel::Params& params, int64_t blocks) {
  if (pretended_shapes_only()) return cudaSuccess;
  const std::lock_guard<std::mutex> guard(one_machine);
  constexpr int kCluster = kClusterOf<Kernel>;
  std::vector<emulation::Array> arrays;
  pretended_arrays(
      [](void* to, const char* data, size_t bytes) {
        static_cast<std::vector<emulation::Array>*>(to)->push_back({data, bytes, true});
      },
      &arrays);
  emulation::Machine machine(Kernel::kThreads, Kernel::kSharedBytes, emulation::WarpOrder::kForward, arrays, kCluster);
  for (int64_t block = 0; block < grid_of<Kernel>(blocks) && machine.findings().empty(); block += kCluster)
    machine.run(static_cast<int>(block), [&](char* shared) { Kernel::run(params, shared); });
  for (const std::string& finding : machine.findings()) std::fprintf(stderr, "%s\n", finding.c_str());
  return machine.findings().empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

template <class Kernel>
Status launch(const typename Kernel::Params& params, int64_t blocks, Queue queue) {
  if (blocks == 0) return cudaSuccess;
  if (grid_of<Kernel>(blocks) > kMostBlocks) return cudaErrorInvalidConfiguration;
  struct Call {
    typename Kernel::Params params;
    int64_t blocks;
  };
  pretended_record(
      queue,
      [](void* what) {
        const Call& call = *static_cast<Call*>(what);
        run_now<Kernel>(call.params, call.blocks);
      },
      new Call{params, blocks});
  return run_now<Kernel>(params, blocks);
}

template <class Kernel>
Status active_clusters(int* count) {
  *count = 1;
  return cudaSuccess;
}

}  // namespace wnfused::gpu

// How the host build "launches" a kernel: cluster after cluster, which are single blocks mostly, on one machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/cluster.h"
#include "emulation/machine.h"

namespace wnfused::gpu {

// What stands for a stream: in which order warps run, the memory that kernels may touch, and what the blocks' machines
// found.
struct Run {
  emulation::WarpOrder order = emulation::WarpOrder::kForward;
  std::vector<emulation::Array> arrays;
  std::vector<std::string> findings;
};
using Queue = Run*;
using Status = int;
constexpr Status kFoundSomething = 1, kTooManyBlocks = 2;

template <class Kernel>
Status launch(const typename Kernel::Params& params, int64_t blocks, Queue queue) {
  constexpr int kCluster = kClusterOf<Kernel>;
  if (grid_of<Kernel>(blocks) > kMostBlocks) return kTooManyBlocks;
  emulation::Machine machine(Kernel::kThreads, Kernel::kSharedBytes, queue->order, queue->arrays, kCluster);
  for (int64_t block = 0; block < blocks && machine.findings().empty(); block += kCluster)
    machine.run(static_cast<int>(block), [&](char* shared) { Kernel::run(params, shared); });
  for (const std::string& finding : machine.findings()) queue->findings.push_back(finding);
  return machine.findings().empty() ? 0 : kFoundSomething;
}

template <class Kernel>
Status active_clusters(int* count) {
  *count = 1;  // one after the other
  return 0;
}

}  // namespace wnfused::gpu

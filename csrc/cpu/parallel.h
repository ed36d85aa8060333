// Workers of one call on torch's thread pool.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "work_queue.h"

namespace wnfused::cpu {

// How many workers a call may use: torch.set_num_threads, but no more than there are processors (one more would
// only wait for a core), and one in a forked child, where the parent's pool has no threads left.
int worker_limit();

// Calls run(worker) once on each of at most `workers` workers, which share the items of one WorkQueue.
template <class Run>
void run_workers(int64_t workers, const Run& run) {
  WorkQueue queue(workers);
  // A task may be handed several workers' places: it takes the first, and helps with the others' shares.
  const auto task = [&](int64_t begin, int64_t) {
    Worker worker(queue, begin);
    run(worker);
  };
  if (workers <= 1) task(0, 1);
  else torch::stable::parallel_for(0, workers, 1, task);
}

}  // namespace wnfused::cpu

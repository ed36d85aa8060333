// Work on torch's thread pool: nothing else asks for it.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "cpu/machine/work_queue.h"

namespace wnfused::cpu {

// How many workers a call may use: torch.set_num_threads, but no more than there are processors (one more would
// only wait for a core), and one in a forked child, where the parent's pool has no threads left.
int worker_limit();

// run(first, last) over parts of [begin, end), each of `grain` places or more unless there is but one.
template <class Run>
void share_out(int64_t begin, int64_t end, int64_t grain, const Run& run) {
  if (begin >= end) return;
  if (end - begin <= grain || worker_limit() == 1) run(begin, end);
  else torch::stable::parallel_for(begin, end, grain, run);
}

constexpr int64_t kGrain = 32768;  // entries below which a second thread costs more than it brings

// The same over rows of `length` entries, on as many threads as they are worth.
template <class Run>
void for_rows(int64_t begin, int64_t end, int64_t length, const Run& run) {
  share_out(begin, end, std::max<int64_t>(kGrain / std::max<int64_t>(length, 1), 1), run);
}

// Calls run(worker) once on each of at most `workers` workers, one at least, which share the items of one WorkQueue.
template <class Run>
void run_workers(int64_t workers, const Run& run) {
  workers = std::max<int64_t>(workers, 1);
  WorkQueue queue(workers);
  // A task may be handed several workers' places: it takes the first, and helps with the others' shares.
  const auto task = [&](int64_t begin, int64_t) {
    Worker worker(queue, begin);
    run(worker);
  };
  share_out(0, workers, 1, task);
  queue.rethrow();
}

}  // namespace wnfused::cpu

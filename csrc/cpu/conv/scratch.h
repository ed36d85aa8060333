// Scratch memory that every call of these kernels needs, and the call.
#pragma once

#include <algorithm>
#include <atomic>

#include "cpu/conv/memory.h"
#include "cpu/machine/parallel.h"
#include "cpu/machine/work_queue.h"
#include "cpu/machine/workspace.h"

namespace wnfused::cpu {

// The line of zeros, `shared` banks unless workers have their own, and `worker_floats` for each worker.
template <class G>
void lay_out_common(Arena& arena, const G& geometry, int64_t shared, int64_t workers, int64_t worker_floats,
                    Scratch& scratch) {
  scratch.zeros = arena.take(zeros_floats(geometry));
  if (geometry.own_banks) {
    scratch.own_bank_stride = geometry.bank_size() + geometry.padded_outputs + kLanes + kApart;
    scratch.own_bank = arena.take(scratch.own_bank_stride * workers);
  } else {
    for (int64_t i = 0; i < shared; ++i)
      scratch.bank[i] = {arena.take(geometry.bank_size()), arena.take(geometry.padded_outputs)};
  }
  // An odd number of lines, so that workers do not share the sets of a cache that they share.
  scratch.worker_stride = ((worker_floats / kLanes + 2) | 1) * kLanes + kApart;
  scratch.worker = arena.take(scratch.worker_stride * workers);
  scratch.packing = 0;
}

// Runs a job, whose scratch memory lay_out(arena, job, workers) places. False when it met a value that is not finite.
template <class Job, class LayOut, class Run>
bool run_once(Job& job, int64_t workers, const LayOut& lay_out, const Run& run) {
  Arena measure(nullptr);
  lay_out(measure, job, workers);
  const Workspace workspace(measure.used());
  Arena arena(workspace.data());
  lay_out(arena, job, workers);
  std::fill_n(job.scratch.zeros, zeros_floats(job.geometry), 0.0f);
  std::atomic<bool> poisoned{false};
  job.poisoned = &poisoned;
  run_workers(workers, [&](Worker& worker) { run(job, worker); });
  return !poisoned.load();
}

}  // namespace wnfused::cpu

// Sharing the work of one call among the tasks of torch's thread pool, without ever assuming that they run at once.
//
// A call is a sequence of phases, each a number of independent items; items of a phase start only when every item of
// the phases before it is done. All items of all phases are numbered in one sequence:
//
//        phase 0            phase 1        phase 2
//   | 0  1  2  3  4  5 | 6  7  8  9 | 10 11 12 ...
//                 ^ done                ^ next (the ticket that will be claimed next)
//
// A worker claims the next ticket, walks to its phase, and waits until `done` has reached the start of that phase. The
// items it waits for were all claimed before its own, so each of them is being run by some worker that is running: one
// worker alone finishes everything, and a task that the pool starts late finds nothing left and leaves. Which worker
// runs an item never changes what the item computes, so results do not depend on the number of threads.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

namespace wnfused::cpu {

struct WorkQueue {
  alignas(64) std::atomic<int64_t> next{0};
  alignas(64) std::atomic<int64_t> done{0};
  alignas(64) std::atomic<int> workers{0};
};

class Worker {
 public:
  explicit Worker(WorkQueue& queue)
      : queue_(queue), index_(queue.workers.fetch_add(1, std::memory_order_relaxed)), ticket_(claim()) {}

  // Distinct for every worker of a call; names its private scratch.
  int index() const { return index_; }

  // Runs this worker's share of `items` items. Every worker calls phase() with the same counts in the same order.
  template <class Run>
  void phase(int64_t items, const Run& run) {
    const int64_t end = start_ + items;
    if (ticket_ < end) wait_until_done(start_);
    while (ticket_ < end) {
      run(ticket_ - start_);
      queue_.done.fetch_add(1, std::memory_order_acq_rel);
      ticket_ = claim();
    }
    start_ = end;
  }

 private:
  int64_t claim() { return queue_.next.fetch_add(1, std::memory_order_relaxed); }

  // Spins for a few microseconds, the length of a short item; then gives the core away, since with more threads than
  // cores the awaited worker may be waiting for this very core.
  void wait_until_done(int64_t target) const {
    constexpr int kSpins = 512;
    for (int spins = 0; queue_.done.load(std::memory_order_acquire) < target; ++spins) {
      if (spins < kSpins) pause();
      else sched_yield();
    }
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
  }

  WorkQueue& queue_;
  int index_;
  int64_t ticket_;
  int64_t start_ = 0;
};

}  // namespace wnfused::cpu

// Sharing the work of one call among the tasks of torch's thread pool, without ever assuming that they run at once.
//
// A call is a sequence of phases, each a few groups of independent items; items of a phase start only when every item
// of the phases before it is done. Every group is cut into as many shares as there are workers, in order:
//
//        group 0                group 1       group 2
//   | 0 1 2 3 : 4 5 6 7 |  8 9 10 : 11 12 |   : 13  |       share of worker 0 : share of worker 1
//
// A worker takes its own share first. Groups of the same shape are cut at the same places in every phase, so a worker
// finds the memory that it reads and writes in its own cache: an item whose lines must be called back from another core
// takes up to three times as long, there and in the next phase at home. So a worker that is done with its share gives
// the others a few microseconds to end theirs, and only then helps with what they have not begun.
//
// An item that was taken is being run by a worker that is running, so nobody waits for a task that the pool has yet to
// start: one worker alone finishes everything, and a late one finds nothing left and leaves. Which worker runs an item
// never changes what the item computes, so results do not depend on the number of threads.
//
// An item that throws ends the call: nobody waits for it, no later phase runs, and whoever made the queue throws again.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <utility>
#include <vector>

#include "cpu/machine/sleep.h"

namespace wnfused::cpu {

class WorkQueue {
 public:
  explicit WorkQueue(int64_t workers) : shares_(workers) {}

  int64_t workers() const { return static_cast<int64_t>(shares_.size()); }

  void arrive() { present_.fetch_add(1, std::memory_order_relaxed); }

  // Whether every worker has come: the pool may have too few threads for that, or start them late.
  bool complete() const { return present_.load(std::memory_order_relaxed) == workers(); }

  // Positions of a share.
  struct Taken {
    int64_t begin, end;
  };

  // The next positions of a share of `size` items in phase `phase`, counted from 1, of which most(left) says how many;
  // none if none is left. The caller has seen every phase before this one done.
  template <class Most>
  Taken take(int64_t share, uint32_t phase, int64_t size, const Most& most) {
    std::atomic<uint64_t>& cursor = shares_[share].cursor;
    uint64_t seen = cursor.load(std::memory_order_relaxed);
    for (;;) {
      const uint32_t current = static_cast<uint32_t>(seen >> 32);
      if (current > phase) return {};
      const int64_t begin = current == phase ? static_cast<uint32_t>(seen) : 0;
      if (begin >= size) return {};
      const int64_t end = begin + most(size - begin);
      const uint64_t next = (static_cast<uint64_t>(phase) << 32) + static_cast<uint64_t>(end);
      if (cursor.compare_exchange_weak(seen, next, std::memory_order_relaxed)) return {begin, end};
    }
  }

  // Of the exceptions of several workers the first is kept.
  void fail(std::exception_ptr exception) {
    if (!failing_.exchange(true)) exception_ = std::move(exception);
    count_done(kFailed);
  }

  bool has_failed() const { return done_.load(std::memory_order_acquire) >= kFailed; }

  // When every worker has left.
  void rethrow() const {
    if (exception_) std::rethrow_exception(exception_);
  }

  // What the items before did is visible to whoever sees them counted.
  void count_done(int64_t items) {
    done_.fetch_add(items, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    changes_.fetch_add(1, std::memory_order_seq_cst);
    wake_all(changes_);
  }

  // Spins for the length of a few items; false if give_up() ended that.
  template <class GiveUp>
  bool spin_until_done(int64_t items, const GiveUp& give_up) const {
    constexpr int kSpins = 1 << 13, kBetween = 8;
    for (int spins = 0; spins < kSpins; ++spins) {
      if (done_.load(std::memory_order_acquire) >= items) return true;
      if (spins % kBetween == 0 && give_up()) return false;
      pause();
    }
    return false;
  }

  // Spins, then sleeps: other programs may keep the awaited worker from its core, or it may be waiting for this very
  // one.
  void wait_until_done(int64_t items) {
    if (spin_until_done(items, [] { return false; })) return;
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    for (;;) {
      const uint32_t seen = changes_.load(std::memory_order_seq_cst);
      if (done_.load(std::memory_order_seq_cst) >= items) break;
      sleep_while(changes_, seen);
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  struct alignas(64) Share {
    std::atomic<uint64_t> cursor{0};  // phase, and how many of its items were taken
  };

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
  }

  static constexpr int64_t kFailed = int64_t{1} << 48;  // more than a call has items, and room to add many of them

  std::vector<Share> shares_;
  std::atomic<int64_t> present_{0};
  std::atomic<bool> failing_{false};
  std::exception_ptr exception_;
  // Who sleeps, and the word that changes for them: beside what is read in every wait anyway.
  alignas(64) std::atomic<int64_t> done_{0};
  std::atomic<int32_t> sleepers_{0};
  SleepWord changes_{0};
};

class Worker {
 public:
  Worker(WorkQueue& queue, int64_t index) : queue_(queue), index_(index) { queue.arrive(); }

  // Distinct for every worker of a call, below the number of workers; names its private scratch.
  int64_t index() const { return index_; }

  int64_t count() const { return queue_.workers(); }
  bool is_alone() const { return count() == 1; }

  // Whether an item of a group of `items` is the first or the last of this worker's share: its neighbour is another's.
  bool is_at_edge(int64_t item, int64_t items) const {
    return !is_alone() && (item == share_begin(items, index_) || is_last(item, items));
  }

  bool is_last(int64_t item, int64_t items) const { return item + 1 == share_begin(items, index_ + 1); }

  // Runs this worker's part of groups of so many items, numbered through. Every worker calls phase() with the same
  // groups in the same order.
  template <class Run>
  void phase(std::initializer_list<int64_t> groups, const Run& run) {
    ++phase_;
    queue_.wait_until_done(start_);
    if (queue_.has_failed()) return;
    run_share(groups, index_, run);
    for (const int64_t items : groups) start_ += items;
    const Clock::time_point patience = Clock::now() + kPatience;
    if (queue_.spin_until_done(start_, [&] { return !queue_.complete() || Clock::now() >= patience; })) return;
    for (int64_t i = 1; i < queue_.workers(); ++i) run_share(groups, (index_ + i) % queue_.workers(), run);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr Clock::duration kPatience = std::chrono::microseconds(5);

  // Its own share a worker takes in pieces, each an eighth of what is left: to take waits until all that was stored
  // before has left the core. From others it takes what they will begin last, one by one.
  template <class Run>
  void run_share(std::initializer_list<int64_t> groups, int64_t share, const Run& run) {
    const int64_t size = share_size(groups, share), pieces = is_alone() ? 1 : 8;
    const auto most = [&](int64_t left) { return share == index_ ? (left + pieces - 1) / pieces : 1; };
    int64_t done = 0;
    for (;;) {
      const WorkQueue::Taken taken = queue_.take(share, phase_, size, most);
      if (taken.begin == taken.end) break;
      try {
        for (int64_t position = taken.begin; position < taken.end; ++position) run(item_of(groups, share, position));
      } catch (...) {
        return queue_.fail(std::current_exception());
      }
      done += taken.end - taken.begin;
    }
    if (done) queue_.count_done(done);
  }

  int64_t share_begin(int64_t items, int64_t share) const { return items * share / queue_.workers(); }

  int64_t share_size(std::initializer_list<int64_t> groups, int64_t share) const {
    int64_t size = 0;
    for (const int64_t items : groups) size += share_begin(items, share + 1) - share_begin(items, share);
    return size;
  }

  int64_t item_of(std::initializer_list<int64_t> groups, int64_t share, int64_t position) const {
    int64_t first = 0;
    for (const int64_t items : groups) {
      const int64_t begin = share_begin(items, share), size = share_begin(items, share + 1) - begin;
      if (position < size) return first + begin + position;
      position -= size;
      first += items;
    }
    return -1;  // not reached: a position is below the size of its share
  }

  WorkQueue& queue_;
  int64_t index_;
  uint32_t phase_ = 0;
  int64_t start_ = 0;  // items of the phases before
};

}  // namespace wnfused::cpu

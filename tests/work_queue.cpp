// The queue of work alone, on threads of its own, built with ThreadSanitizer: every phase reads what the one before
// wrote with plain loads, so a missing order of memory is a report, and a lost wake-up never ends.
#include "cpu/machine/work_queue.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

using wnfused::cpu::Worker;
using wnfused::cpu::WorkQueue;

namespace {

constexpr int64_t kItems = 64, kPhases = 20;

void sleep_for(int microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

// b[i] counts the phases. Now and then a worker comes late, or an item takes longer than the others spin.
bool run(int64_t workers, int round) {
  WorkQueue queue(workers);
  std::vector<int64_t> a(kItems, 0), b(kItems, 0);
  const auto work = [&](int64_t index) {
    if (round % 4 == 1 && index == workers - 1) sleep_for(200);
    Worker worker(queue, index);
    for (int64_t p = 0; p < kPhases; ++p) {
      worker.phase({40, 24}, [&](int64_t i) {
        a[i] = b[i] + 1;
        if (round % 4 == 2 && i == kItems - 1) sleep_for(300);
      });
      worker.phase({kItems}, [&](int64_t i) { b[i] = a[kItems - 1 - i]; });
    }
  };
  std::vector<std::thread> threads;
  for (int64_t w = 1; w < workers; ++w) threads.emplace_back(work, w);
  work(0);
  for (std::thread& thread : threads) thread.join();
  for (const int64_t phases : b)
    if (phases != kPhases) return false;
  return true;
}

// An item that throws while the others sleep: every worker leaves, no item of a later phase has run, and the exception
// is there.
bool fails(int64_t workers, int64_t thrower) {
  WorkQueue queue(workers);
  std::atomic<int64_t> later{0};
  const auto work = [&](int64_t index) {
    Worker worker(queue, index);
    worker.phase({kItems}, [&](int64_t i) {
      if (i == thrower) {
        sleep_for(1000);
        throw thrower;
      }
    });
    worker.phase({kItems}, [&](int64_t) { ++later; });
  };
  std::vector<std::thread> threads;
  for (int64_t w = 1; w < workers; ++w) threads.emplace_back(work, w);
  work(0);
  for (std::thread& thread : threads) thread.join();
  try {
    queue.rethrow();
  } catch (int64_t thrown) {
    return thrown == thrower && later == 0;
  }
  return false;
}

// Where the owner changes from one item to the next, both are at an edge; a worker alone has none.
bool edges(int64_t workers) {
  WorkQueue queue(workers);
  std::vector<Worker> all;
  for (int64_t w = 0; w < workers; ++w) all.emplace_back(queue, w);
  const auto owner = [&](int64_t item) {
    int64_t w = 0;
    while (kItems * (w + 1) / workers <= item) ++w;
    return w;
  };
  for (int64_t i = 0; i < kItems; ++i) {
    const bool begins = i == 0 || owner(i - 1) != owner(i), ends = i + 1 == kItems || owner(i + 1) != owner(i);
    if (all[owner(i)].is_at_edge(i, kItems) != (workers > 1 && (begins || ends))) return false;
  }
  return true;
}

}  // namespace

int main(int, char** arguments) {
  const int64_t workers = std::atoi(arguments[1]);
  if (!edges(workers)) return std::puts("an edge is missing"), 1;
  for (int round = 0; round < 100; ++round)
    if (!run(workers, round)) return std::puts("a phase was lost"), 1;
  for (int64_t thrower = 0; thrower < kItems; thrower += 7)
    if (!fails(workers, thrower)) return std::puts("an exception was lost"), 1;
  return 0;
}

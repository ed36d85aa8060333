// Sleeping until another thread changes a word of memory.
//
// A waiting thread that gives its core away with sched_yield, again and again, loses a whole time slice each time to
// whoever else has work for that core; one that sleeps is put back as soon as it is woken.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

namespace wnfused::cpu {

using SleepWord = std::atomic<uint32_t>;
static_assert(sizeof(SleepWord) == 4, "the kernel looks at four bytes");

// Returns when the word is not `seen`, was woken, or for no reason at all.
inline void sleep_while(SleepWord& word, uint32_t seen) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
  if (word.load(std::memory_order_acquire) == seen) sched_yield();
#endif
}

inline void wake_all(SleepWord& word) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

}  // namespace wnfused::cpu

// Fetching ahead what will be read, or written.
#pragma once

#include "cpu/vec/vec.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Parameters that the next phase will pack. In a network deeper than the cache they come from memory, which would
// otherwise be idle while convolutions run.
struct Upcoming {
  const char* data;
  int64_t bytes;

  WNFUSED_INLINE Upcoming part(int64_t index, int64_t parts) const {
    const int64_t begin = bytes * index / parts;
    return {data + begin, bytes * (index + 1) / parts - begin};
  }

  WNFUSED_INLINE void prefetch() const {
    constexpr int kSecondLevel = 2;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(data + i, 0, kSecondLevel);
  }

  // A few lines at a time, for loops that leave the memory idle. Lines that come from afar one behind the other hold up
  // what a processor executes after them.
  WNFUSED_INLINE void step(int64_t lines = 4) {
    if (bytes <= 0) return;
    const Upcoming next{data, bytes < 64 * lines ? bytes : 64 * lines};
    next.prefetch();
    data += next.bytes;
    bytes -= next.bytes;
  }
};

// The same of rows that lie apart, one at a time.
struct UpcomingRows {
  const char* data;
  int64_t bytes, stride, rows;

  WNFUSED_INLINE void step() {
    if (rows <= 0) return;
    Upcoming{data, bytes}.prefetch();
    data += stride;
    --rows;
  }
};

// What may be in none of the nearer caches: parameters and, in a backward, a saved map, which the next phase reads; and
// the bank of this phase, if it was packed by an earlier call.
struct Ahead {
  Upcoming weights, map;
  bool bank = false;

  WNFUSED_INLINE void prefetch() const {
    weights.prefetch();
    map.prefetch();
  }
};

// The same in so many steps, as even as whole lines allow.
class FetchEvenly {
 public:
  FetchEvenly(const Ahead& ahead, int64_t steps)
      : weights_(ahead.weights),
        map_(ahead.map),
        weight_lines_(lines(weights_, steps)),
        map_lines_(lines(map_, steps)) {}

  WNFUSED_INLINE void step() {
    weights_.step(weight_lines_);
    map_.step(map_lines_);
  }

 private:
  static int64_t lines(const Upcoming& all, int64_t steps) { return (all.bytes + 64 * steps - 1) / (64 * steps); }

  Upcoming weights_, map_;
  int64_t weight_lines_, map_lines_;
};

// The same by steps, from the caller's own: a copy in whole vectors would wait until all stores before it have left the
// core.
class FetchBySteps {
 public:
  explicit FetchBySteps(Ahead& left) : left_(left) {}

  // Weights of a small map are many lines to few products: what no step fetched is fetched at the end, where all waits.
  WNFUSED_INLINE void step() {
    constexpr int64_t kWeightLines = 16;
    if (left_.weights.bytes > 0) left_.weights.step(kWeightLines);
    else left_.map.step();
  }

  void finish() {
    for (Upcoming* left : {&left_.weights, &left_.map}) {
      left->prefetch();
      left->bytes = 0;
    }
  }

 private:
  Ahead& left_;
};

// Fetches a line for this core alone. Processors without the instruction do nothing.
WNFUSED_INLINE void prefetch_for_writing(const void* line) {
#if defined(__x86_64__)
  __asm__ __volatile__("prefetchw %0" : : "m"(*static_cast<const char*>(line)));
#else
  __builtin_prefetch(line, 1);
#endif
}

}  // namespace wnfused::cpu::WNFUSED_ISA

// Memory that nobody uses at the moment, kept for whoever asks next. A slot is one atomic pointer, taken out by
// exchange and put back by compare-exchange: two threads never share what is in it, and there is nothing to unlock
// after a fork.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "cpu/machine/pages.h"

namespace wnfused::cpu {

// Never destroyed: torch, whose tensors come back to it, may be gone before this library is.
template <int kSlots>
class Shelf {
 public:
  // kept_floats: how many it keeps at most.
  explicit constexpr Shelf(int64_t (*kept_floats)()) : kept_floats_(kept_floats) {}

  // The smallest of at least `floats` and at most `most`. Where there are none null, and the largest one below goes:
  // what grows from call to call would otherwise leave all sizes behind that it has had.
  std::unique_ptr<Pages> take(int64_t floats, int64_t most) {
    clock_.fetch_add(1, std::memory_order_relaxed);
    for (int attempt = 0; attempt < kSlots; ++attempt) {
      Slot* best = best_slot([&](int64_t size, int64_t than) { return size >= floats && size <= most && size < than; },
                             INT64_MAX);
      if (!best) break;
      // Somebody else may have been here since.
      std::unique_ptr<Pages> pages = best->empty(floats_);
      if (pages && pages->floats() >= floats && pages->floats() <= most) return pages;
      if (pages) put(std::move(pages));
    }
    if (Slot* smaller = best_slot([&](int64_t size, int64_t than) { return size < floats && size > than; }, -1))
      smaller->empty(floats_);
    return nullptr;
  }

  // Keeps the pages in an empty slot, else in the place of others, as long as the sum of all stays in bounds: of those
  // that have not been used for long, then of smaller ones.
  void put(std::unique_ptr<Pages> pages) {
    const int64_t size = pages->floats(), kept = kept_floats_();
    if (size > kept) return;
    for (int attempt = 0; attempt <= kSlots; ++attempt) {
      const int64_t now = clock_.load(std::memory_order_relaxed);
      if (floats_.fetch_add(size) + size <= kept)
        for (Slot& slot : slots_)
          if (slot.fill(pages, now)) return;
      floats_.fetch_sub(size);
      Slot* dropped = stale_slot(now);
      if (!dropped)
        dropped = best_slot([](int64_t floats, int64_t than) { return floats < than; }, size);
      if (!dropped || !dropped->empty(floats_)) return;
    }
  }

  void clear() {
    for (Slot& slot : slots_) slot.empty(floats_);
  }

 private:
  struct Slot {
    std::atomic<Pages*> pages{nullptr};
    std::atomic<int64_t> size{0}, since{0};  // of what was put here last, and when: hints

    bool is_empty() const { return !pages.load(std::memory_order_relaxed); }

    // What was in it; the shelf's sum is that much less.
    std::unique_ptr<Pages> empty(std::atomic<int64_t>& floats) {
      std::unique_ptr<Pages> taken(pages.exchange(nullptr));
      if (taken) floats.fetch_sub(taken->floats());
      return taken;
    }

    // False, and the pages stay with the caller, where there are some already.
    bool fill(std::unique_ptr<Pages>& given, int64_t now) {
      const int64_t floats = given->floats();
      Pages* none = nullptr;
      if (!is_empty() || !pages.compare_exchange_strong(none, given.get())) return false;
      given.release();
      size.store(floats, std::memory_order_relaxed);
      since.store(now, std::memory_order_relaxed);
      return true;
    }
  };

  // The slot whose size is better(size, than) all others', beginning with `than`.
  template <class Better>
  Slot* best_slot(const Better& better, int64_t than) {
    Slot* best = nullptr;
    for (Slot& slot : slots_) {
      const int64_t size = slot.size.load(std::memory_order_relaxed);
      if (slot.is_empty() || !better(size, than)) continue;
      best = &slot;
      than = size;
    }
    return best;
  }

  // The one that nobody has wanted for longest, if that is more calls than a step has.
  Slot* stale_slot(int64_t now) {
    constexpr int64_t kStale = 4096;
    Slot* stale = nullptr;
    int64_t oldest = now - kStale;
    for (Slot& slot : slots_) {
      const int64_t since = slot.since.load(std::memory_order_relaxed);
      if (slot.is_empty() || since >= oldest) continue;
      stale = &slot;
      oldest = since;
    }
    return stale;
  }

  int64_t (*kept_floats_)();
  std::atomic<int64_t> floats_{0}, clock_{0};  // of all; how often somebody asked
  Slot slots_[kSlots];
};

}  // namespace wnfused::cpu

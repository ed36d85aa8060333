// How far apart the processor's cores are: what a line of memory takes from one core's cache to another's.
//
//   cpu_crossing_seconds() -> float
//
// Phases of a call begin and end with such a line, and maps cross in hundreds of them, so that on a virtual machine
// whose host moves its cores between dies small batches take up to twice as long from one second to the next. A
// benchmark that does not know the distance takes that for noise.
#include <torch/csrc/stable/library.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <thread>

namespace wnfused::cpu {
namespace {

using Clock = std::chrono::steady_clock;

// One processor alone would wait for its turn each time.
constexpr auto kPatience = std::chrono::milliseconds(50);

struct alignas(64) Ball {
  std::atomic<int64_t> at{0};

  // False if it did not come in time.
  bool wait_for(int64_t value, Clock::time_point end) const {
    for (int64_t spins = 0; at.load(std::memory_order_acquire) != value; ++spins)
      if (spins % 1024 == 1023 && Clock::now() > end) return false;
    return true;
  }
};

// Threads of its own: torch's pool may run two tasks one after the other.
double cpu_crossing_seconds() {
  constexpr int64_t kWarm = 300, kThrows = 3000;
  const Clock::time_point end = Clock::now() + kPatience;
  Ball ball;
  std::thread partner([&] {
    for (int64_t i = 0; i < kWarm + kThrows && ball.wait_for(2 * i + 1, end); ++i)
      ball.at.store(2 * i + 2, std::memory_order_release);
  });
  Clock::time_point start{};
  bool came = true;
  for (int64_t i = 0; i < kWarm + kThrows && came; ++i) {
    if (i == kWarm) start = Clock::now();
    ball.at.store(2 * i + 1, std::memory_order_release);
    came = ball.wait_for(2 * i + 2, end);
  }
  const std::chrono::duration<double> seconds = Clock::now() - start;
  partner.join();
  return came ? seconds.count() / (2 * kThrows) : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace
}  // namespace wnfused::cpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CompositeExplicitAutograd, library) {
  library.impl("cpu_crossing_seconds", TORCH_BOX(&wnfused::cpu::cpu_crossing_seconds));
}

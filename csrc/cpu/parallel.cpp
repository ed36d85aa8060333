#include "parallel.h"

#include <pthread.h>

#if defined(__linux__)
#include <sched.h>
#else
#include <thread>
#endif

namespace wnfused::cpu {
namespace {

bool forked = false;

const int fork_handler = pthread_atfork(nullptr, nullptr, [] { forked = true; });

int64_t usable_processors() {
#if defined(__linux__)
  cpu_set_t processors;
  if (sched_getaffinity(0, sizeof processors, &processors) == 0) return std::max(1, CPU_COUNT(&processors));
  return CPU_SETSIZE;
#else
  return std::max(1u, std::thread::hardware_concurrency());
#endif
}

}  // namespace

int worker_limit() {
  if (forked) return 1;
  return static_cast<int>(std::min<int64_t>(torch::stable::get_num_threads(), usable_processors()));
}

}  // namespace wnfused::cpu

#include "cpu/machine/parallel.h"

#include <pthread.h>

#include <thread>

namespace wnfused::cpu {
namespace {

bool forked = false;

const int fork_handler = pthread_atfork(nullptr, nullptr, [] { forked = true; });

}  // namespace

int worker_limit() {
  if (forked) return 1;
  static const int processors = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  return std::min(static_cast<int>(torch::stable::get_num_threads()), processors);
}

}  // namespace wnfused::cpu

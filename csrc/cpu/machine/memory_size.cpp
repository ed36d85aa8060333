#include "cpu/machine/memory_size.h"

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

#include <algorithm>
#include <fstream>

namespace wnfused::cpu {
namespace {

constexpr int64_t kUnknown = int64_t{4} << 30;

int64_t machine_size() {
#if defined(_SC_PHYS_PAGES)
  const int64_t pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGE_SIZE);
  if (pages > 0 && page > 0) return pages * page;
#endif
  return kUnknown;
}

}  // namespace

int64_t memory_size() {
  static const int64_t size = [] {
    int64_t least = machine_size();
    // Control groups of version 2, where "max" is no number, and of version 1.
    for (const char* path : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
      int64_t limit = 0;
      if (std::ifstream(path) >> limit && limit > 0) least = std::min(least, limit);
    }
    return least;
  }();
  return size;
}

}  // namespace wnfused::cpu

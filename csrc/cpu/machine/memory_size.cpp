#include "cpu/machine/memory_size.h"

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

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

// The least limit of a control group and of those above it, up to the root of their hierarchy: `limit` is a file of
// each. A group that is not to be seen from here, as in some containers, has none of its own; "max" is no number.
int64_t least_limit(const std::string& root, std::string group, const std::string& limit) {
  int64_t least = INT64_MAX;
  for (;;) {
    int64_t found = 0;
    if (std::ifstream(root + group + "/" + limit) >> found && found > 0) least = std::min(least, found);
    if (group.empty()) return least;
    const size_t parent = group.rfind('/');
    group.erase(parent == std::string::npos ? 0 : parent);
  }
}

// Found when the library is loaded, so that no fork comes between.
const int64_t size = std::min(machine_size(), group_limit()) / local_ranks();

}  // namespace

// Of the groups of this process: of version 2 in lines "0::/group", of version 1 in lines "4:cpu,memory:/group".
int64_t group_limit(const std::string& root) {
  int64_t least = INT64_MAX;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    std::string number, controllers, group;
    std::istringstream parts(line);
    std::getline(parts, number, ':');
    std::getline(parts, controllers, ':');
    if (!std::getline(parts, group)) continue;
    if (controllers.empty()) {
      least = std::min(least, least_limit(root + "/sys/fs/cgroup", group, "memory.max"));
    } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      least = std::min(least, least_limit(root + "/sys/fs/cgroup/memory", group, "memory.limit_in_bytes"));
    }
  }
  return least;
}

int64_t local_ranks() {
  const char* given = std::getenv("LOCAL_WORLD_SIZE");
  return given ? std::max(std::atoi(given), 1) : 1;
}

int64_t memory_size() { return size; }

}  // namespace wnfused::cpu

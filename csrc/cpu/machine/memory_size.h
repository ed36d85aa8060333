#pragma once

#include <cstdint>
#include <string>

namespace wnfused::cpu {

// Bytes of memory that this process may use: the machine's, or what its control group is limited to, shared with the
// other ranks that torchrun started here. Measured once.
int64_t memory_size();

// How many ranks torchrun started on this machine; 1 where it did not.
int64_t local_ranks();

// The least limit of the control groups of this process and of those above them, INT64_MAX without one; their files
// are those below `root`, which a test gives.
int64_t group_limit(const std::string& root = "");

}  // namespace wnfused::cpu

#pragma once

#include <cstdint>

namespace wnfused::cpu {

// Bytes of memory that this process may use: the machine's, or what its control group is limited to. Measured once.
int64_t memory_size();

}  // namespace wnfused::cpu

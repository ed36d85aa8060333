// Which instruction set the kernels use: chosen once from the processor, or forced by tests.
#pragma once

#include <string>

namespace wnfused::cpu {

enum class Isa { kPortable, kAvx2, kAvx512 };

// The instruction set in use.
Isa active_isa();

// "portable", "avx2", "avx512"
const char* isa_name(Isa isa);

}  // namespace wnfused::cpu

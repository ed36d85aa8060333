// Whether AMX can be used.
#pragma once

namespace wnfused::cpu {

// The processor has tiles and bfloat16 products, the kernel grants this process their state, and the instructions give
// the results of their emulation. Asked for once.
bool amx_usable();

}  // namespace wnfused::cpu

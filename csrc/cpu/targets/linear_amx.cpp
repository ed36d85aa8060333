// A linear layer in bfloat16 for AMX, with AVX-512 for all that is no product.
#if defined(__x86_64__)
#include "cpu/targets/plain.h"
#include "cpu/targets/target_avx512_bf16.h"

#define WNFUSED_ISA amx
#define WNFUSED_TILES tiles::Amx
#include "cpu/linear/tile_kernels.h"
#include "cpu/targets/target_end.h"
#endif  // __x86_64__

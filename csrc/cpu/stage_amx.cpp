// The stage's kernels on bfloat16 for AMX, with AVX-512 for all that is no product.
#if defined(__x86_64__)
#include "stage.h"
#include "tiles.h"
#include "target_avx512_bf16.h"

#define WNFUSED_ISA amx
#define WNFUSED_TILES tiles::Amx
#include "stage_tiles.h"
#include "stage_pair_kernels.h"
#include "target_end.h"
#endif  // __x86_64__

// Convolution layers on bfloat16 for AMX, with AVX-512 for all that is no product.
#if defined(__x86_64__)
#include "cpu/targets/plain.h"
#include "cpu/targets/target_avx512_bf16.h"

#define WNFUSED_ISA amx
#define WNFUSED_TILES tiles::Amx
#include "cpu/products/pair_amx.h"
#include "cpu/conv_layer/pair_kernels.h"
#include "cpu/targets/target_end.h"
#endif  // __x86_64__

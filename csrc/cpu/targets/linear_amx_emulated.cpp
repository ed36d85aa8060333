// The kernels of linear_amx.cpp over emulated tiles and 128-bit vectors: what tests run where there is no AMX.
#include "cpu/targets/plain.h"

#define WNFUSED_ISA amx_emulated
#define WNFUSED_VECTOR_BITS 128
#define WNFUSED_TILES tiles::Emulated
#include "cpu/linear/tile_kernels.h"

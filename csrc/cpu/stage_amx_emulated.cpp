// The kernels of stage_amx.cpp over emulated tiles and 128-bit vectors: what tests run where there is no AMX.
#include "stage.h"
#include "tiles.h"

#define WNFUSED_ISA amx_emulated
#define WNFUSED_VECTOR_BITS 128
#define WNFUSED_TILES tiles::Emulated
#include "stage_tiles.h"
#include "stage_pair_kernels.h"

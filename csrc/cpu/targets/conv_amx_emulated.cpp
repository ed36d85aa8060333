// The kernels of conv_amx.cpp over emulated tiles and 128-bit vectors: what tests run where there is no AMX.
#include "cpu/targets/plain.h"

#define WNFUSED_ISA amx_emulated
#define WNFUSED_VECTOR_BITS 128
#define WNFUSED_TILES tiles::Emulated
#include "cpu/products/pair_amx.h"
#include "cpu/conv_layer/pair_kernels.h"

// Orthonormal rows for 128-bit vectors, which every processor has.
#include "cpu/targets/plain.h"
#include "cpu/targets/target_portable.h"

#include "cpu/orthonormal/kernels.h"
#include "cpu/targets/target_end.h"

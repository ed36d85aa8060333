// Orthonormal rows for 128-bit vectors, which every processor has.
#include "orthonormal.h"
#include "stage.h"
#include "target_portable.h"

#include "orthonormal_kernels.h"
#include "target_end.h"

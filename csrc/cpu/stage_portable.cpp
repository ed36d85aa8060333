// The stage's kernels for 128-bit vectors, which every processor has.
#include "conv3x3.h"
#include "target_portable.h"

#include "stage_kernels.h"
#include "target_end.h"

// The stage's kernels for 128-bit vectors, which every processor has.
#include "conv_layer.h"
#include "linear_layer.h"
#include "target_portable.h"

#include "stage_kernels.h"
#include "target_end.h"

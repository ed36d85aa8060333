// A single layer's kernels for 128-bit vectors, which every processor has.
#include <type_traits>

#include "layer.h"
#include "stage.h"
#include "target_portable.h"

#include "layer_kernels.h"
#include "target_end.h"

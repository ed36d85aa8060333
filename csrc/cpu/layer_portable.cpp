// A single layer's kernels for 128-bit vectors, which every processor has.
#include <type_traits>

#include "layer.h"
#include "stage.h"

#define WNFUSED_ISA portable
#define WNFUSED_VECTOR_BITS 128
#include "layer_kernels.h"

// The kernels of linear layers, and what stands beside the vendor's products, for vectors that every processor has.
#include "cpu/targets/plain.h"
#include "cpu/targets/target_portable.h"

#include "cpu/targets/layer_kernels.h"
#include "cpu/targets/target_end.h"

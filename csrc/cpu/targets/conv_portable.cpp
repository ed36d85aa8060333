// The kernels of stages and convolution layers for 128-bit vectors, which every processor has.
#include "cpu/targets/plain.h"
#include "cpu/targets/target_portable.h"

#include "cpu/targets/conv_kernels.h"
#include "cpu/targets/target_end.h"

// The primitives of sm_90 that the warpgroup kernels are written over, beside those of target.h: PTX under nvcc, which
// has to compile for sm_90a then, and the emulated machine under any other compiler.
#pragma once

#include "cuda/target.h"

#ifdef __CUDACC__
#include "cuda/hopper_primitives.h"
#else
#include "emulation/hopper_primitives.h"
#endif

namespace wnfused::gpu {

// What wgmma is told of an operand in shared memory: a start and two strides, all multiples of 16 bytes. Without a
// swizzle an operand is made of 8 x 16 bytes whose 8 rows follow each other; `depth_stride` leads from those of 8
// values of k to those of the next 8, `row_stride` from 8 rows (of a) or columns (of b) to the next 8.
WNFUSED_DEVICE uint64_t matrix_descriptor(const char* start, int depth_stride, int row_stride) {
  return static_cast<uint64_t>((shared_address(start) & 0x3ffff) >> 4) |
         static_cast<uint64_t>(depth_stride >> 4) << 16 | static_cast<uint64_t>(row_stride >> 4) << 32;
}

// The same `bytes` further on.
WNFUSED_DEVICE uint64_t moved(uint64_t descriptor, int bytes) { return descriptor + (bytes >> 4); }

}  // namespace wnfused::gpu

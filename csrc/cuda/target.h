// What kernel code is written over: a few primitives, which are PTX under nvcc and plain C++ under any other compiler.
// The kernels' headers include this file and nothing of CUDA, so that the same source runs on the host (emulation/).
#pragma once

#ifdef __CUDACC__
#include "cuda/launch.h"
#include "cuda/primitives.h"
#else
#include "emulation/launch.h"
#include "emulation/primitives.h"
#endif

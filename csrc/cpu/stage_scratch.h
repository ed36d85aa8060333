// Scratch memory that every call of the stage's kernels needs.
#pragma once

#include "stage.h"
#include "workspace.h"

namespace wnfused::cpu {

// Panel and product of one chunk, or what packing and finishing need: private to a worker.
int64_t worker_floats(const Geometry& geometry);

// Of the line of zeros, which whoever runs the kernels must clear.
int64_t zeros_floats(const Geometry& geometry);

// The line of zeros, the banks of a convolution, and `worker_floats` for each worker.
void lay_out_common(Arena& arena, const Geometry& geometry, int64_t workers, int64_t worker_floats, Scratch& scratch);

}  // namespace wnfused::cpu

// Scratch memory that every call of these kernels needs.
#pragma once

#include "cpu/conv/memory.h"
#include "cpu/machine/workspace.h"

namespace wnfused::cpu {

// The line of zeros, `shared` banks unless workers have their own, and `worker_floats` for each worker.
template <class G>
void lay_out_common(Arena& arena, const G& geometry, int64_t shared, int64_t workers, int64_t worker_floats,
                    Scratch& scratch) {
  scratch.zeros = arena.take(zeros_floats(geometry));
  if (geometry.own_banks) {
    scratch.own_bank_stride = geometry.bank_size() + geometry.padded_outputs + kLanes + kApart;
    scratch.own_bank = arena.take(scratch.own_bank_stride * workers);
  } else {
    for (int64_t i = 0; i < shared; ++i)
      scratch.bank[i] = {arena.take(geometry.bank_size()), arena.take(geometry.padded_outputs)};
  }
  // An odd number of lines, so that workers do not share the sets of a cache that they share.
  scratch.worker_stride = ((worker_floats / kLanes + 2) | 1) * kLanes + kApart;
  scratch.worker = arena.take(scratch.worker_stride * workers);
  scratch.packing = 0;
}

}  // namespace wnfused::cpu

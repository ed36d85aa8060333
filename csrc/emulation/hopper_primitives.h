// The primitives of cuda/hopper_primitives.h on the emulated machine.
#pragma once

#include "emulation/primitives.h"

namespace wnfused::gpu {

constexpr int kPhaseBarrierBytes = 8;

inline uint32_t shared_address(const char* address) {
  return static_cast<uint32_t>(Machine::current().offset_of(address));
}

inline int cluster_rank() { return Machine::current().rank(); }
inline void cluster_barrier() { Machine::current().cluster_barrier(); }

inline void create_phase_barrier(char* barrier, int arrivals) {
  Machine::current().create_phase_barrier(barrier, arrivals);
}
inline void arrive_expecting(char* barrier, int bytes) {
  Machine::current().arrive(barrier, cluster_rank(), bytes);
}
inline void arrive_at_block(char* barrier, int rank) { Machine::current().arrive(barrier, rank, 0); }
inline void wait_for_phase(char* barrier, int parity) { Machine::current().wait_for_phase(barrier, parity); }
inline void copy_to_blocks(char* shared, const void* global, int bytes, char* barrier, int blocks) {
  Machine::current().copy_to_blocks(shared, global, bytes, barrier, blocks);
}

void begin_products();
void commit_products();
void wait_products(int pending);
template <int kPending>
void wait_products() {
  wait_products(kPending);
}
template <int kTiles, int kColumns>
void settle(float (&)[kTiles][kColumns][4]) {}

// Values a 16-byte piece of an operand has, 8 of bf16 or 4 of tf32.
void multiply_warpgroup(float (*c)[4], int tiles, const uint32_t (&a)[4], uint64_t b, bool adds, int vector);
template <int kTiles>
void multiply_warpgroup_bf16(float (&c)[kTiles][4], const uint32_t (&a)[4], uint64_t b, bool adds) {
  multiply_warpgroup(c, kTiles, a, b, adds, 8);
}
template <int kTiles>
void multiply_warpgroup_tf32(float (&c)[kTiles][4], const uint32_t (&a)[4], uint64_t b, bool adds) {
  multiply_warpgroup(c, kTiles, a, b, adds, 4);
}

}  // namespace wnfused::gpu

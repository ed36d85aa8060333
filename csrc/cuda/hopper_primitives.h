// The primitives of hopper.h as PTX for sm_90a. emulation/hopper_primitives.h declares the same names.
//
// A phase barrier ("mbarrier") is 8 bytes of shared memory that count arrivals and the bytes of copies; when all that a
// phase expects have come, the next phase begins. Waiting names the parity of the phase to be over: 0, 1, 0, ...
#pragma once

#include "cuda/primitives.h"

namespace wnfused::gpu {

constexpr int kPhaseBarrierBytes = 8;

// This block's number in its cluster.
WNFUSED_DEVICE int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// For all threads of all blocks of the cluster; what they wrote before it is seen after it, also in each other's
// memory.
WNFUSED_DEVICE void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// By one thread; a cluster_barrier() follows before anyone uses it.
WNFUSED_DEVICE void create_phase_barrier(char* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\nfence.mbarrier_init.release.cluster;" ::"r"(
                   shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// An arrival at this block's own barrier, which also makes the phase wait for so many bytes of copies.
WNFUSED_DEVICE void arrive_expecting(char* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// An arrival at the barrier that stands at the same place of block `rank` of the cluster: this thread's products have
// read what other blocks' copies may overwrite. No stores are handed over, so it is not a release to the whole cluster,
// which would wait until all stores to global memory so far, the kept maps, have been performed.
WNFUSED_DEVICE void arrive_at_block(char* barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

// By whole warps. What it waits for are copies and arrivals without stores: no acquire from the cluster either, which
// would discard the first-level cache.
WNFUSED_DEVICE void wait_for_phase(char* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred over;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n@!over bra again;\n}" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// By one thread: copies to the same place of every block of the cluster that is in `blocks`, a bit each, and reports
// the bytes to each one's barrier. All multiples of 16 bytes.
WNFUSED_DEVICE void copy_to_blocks(char* shared, const void* global, int bytes, char* barrier, int blocks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "h"(static_cast<uint16_t>(blocks))
      : "memory");
}

// Before the first product, and wherever sums were used between products.
WNFUSED_DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the group of the products since the last commit.
WNFUSED_DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `kPending` groups of products are under way. Their sums must not be touched before.
template <int kPending>
WNFUSED_DEVICE void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The sums are read no earlier than here, behind the wait for their products.
template <int kTiles, int kColumns>
WNFUSED_DEVICE void settle(float (&sums)[kTiles][kColumns][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
      asm volatile("" : "+f"(sums[i][j][0]), "+f"(sums[i][j][1]), "+f"(sums[i][j][2]), "+f"(sums[i][j][3]));
}

// c += a b, or c = a b where it does not add, by the four warps of a warpgroup, sums in fp32: each warp brings 16 rows
// of a, of 16 values of bf16 or 8 of tf32, as fragments of mma; b is in shared memory, of 32 or 64 columns, and the
// warp's rows of c are as mma leaves them. Neither a nor c may be touched before the products have been waited for.
WNFUSED_DEVICE void multiply_warpgroup_bf16(float (&c)[4][4], const uint32_t (&a)[4], uint64_t b, bool adds) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.b32 adds, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, adds, 1, 1, 0;\n"
      "}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]),
        "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]),
        "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]),
        "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
        "r"(static_cast<int>(adds)));
}

WNFUSED_DEVICE void multiply_warpgroup_bf16(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b, bool adds) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.b32 adds, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, adds, 1, 1, 0;\n"
      "}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]),
        "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]),
        "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]),
        "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]),
        "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]),
        "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
        "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]),
        "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
        "r"(static_cast<int>(adds)));
}

WNFUSED_DEVICE void multiply_warpgroup_tf32(float (&c)[4][4], const uint32_t (&a)[4], uint64_t b, bool adds) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.b32 adds, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k8.f32.tf32.tf32 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, adds, 1, 1;\n"
      "}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]),
        "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]),
        "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]),
        "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
        "r"(static_cast<int>(adds)));
}

WNFUSED_DEVICE void multiply_warpgroup_tf32(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b, bool adds) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.b32 adds, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, adds, 1, 1;\n"
      "}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]),
        "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]),
        "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]),
        "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]),
        "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]),
        "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
        "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]),
        "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
        "r"(static_cast<int>(adds)));
}

}  // namespace wnfused::gpu

// The primitives as PTX, sm_80 and later. emulation/primitives.h declares the same names.
//
// A pointer to shared memory is a `char*` into the block's dynamic allocation. Fragments are as PTX defines them for
// mma.m16n8k16 (bf16) and mma.m16n8k8 (tf32): with row = lane / 4 and t = lane % 4, and k counted in registers' worth
// (pairs of bf16, single tf32 values),
//   a[0..3]  (row, t)  (row + 8, t)  (row, t + 4)  (row + 8, t + 4)
//   b[0..1]  (k = t, column = row)  (k = t + 4, column = row)
//   c[0..3]  (row, 2 t)  (row, 2 t + 1)  (row + 8, 2 t)  (row + 8, 2 t + 1)
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#define WNFUSED_DEVICE __device__ __forceinline__
#define WNFUSED_HOST_DEVICE __host__ __device__

namespace wnfused::gpu {

WNFUSED_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
WNFUSED_DEVICE int lane_index() { return static_cast<int>(threadIdx.x & 31); }
WNFUSED_DEVICE int block_index() { return static_cast<int>(blockIdx.x); }

// The same value, of which the compiler knows nothing: what is computed from it is computed here, not kept in registers
// from an earlier place.
WNFUSED_DEVICE int computed_again(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Everything that the block's threads wrote before it is seen by all of them after it.
WNFUSED_DEVICE void block_barrier() { __syncthreads(); }

template <class T>
WNFUSED_DEVICE T load_shared(const char* address) {
  return *reinterpret_cast<const T*>(address);
}

template <class T>
WNFUSED_DEVICE void store_shared(char* address, T value) {
  *reinterpret_cast<T*>(address) = value;
}

// Global memory that no thread of this launch writes.
template <class T>
WNFUSED_DEVICE T load_global(const void* address) {
  return __ldg(static_cast<const T*>(address));
}

// Global memory that no other thread of this launch writes.
template <class T>
WNFUSED_DEVICE T load_own(const void* address) {
  return *static_cast<const T*>(address);
}

template <class T>
WNFUSED_DEVICE void store_global(void* address, T value) {
  *static_cast<T*>(address) = value;
}

struct alignas(16) Bytes16 {
  uint32_t word[4];
};

struct alignas(8) FloatPair {
  float low, high;
};

template <>
WNFUSED_DEVICE FloatPair load_global<FloatPair>(const void* address) {
  const float2 v = __ldg(static_cast<const float2*>(address));
  return {v.x, v.y};
}

WNFUSED_DEVICE uint32_t shared_address(const char* address) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(address));
}

// Copies 16 bytes to shared memory, zeros where not `valid`; they arrive when the thread waits for their group.
WNFUSED_DEVICE void copy_async(char* shared, const void* global, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 16 : 0));
}

// Closes the group of the copies since the last commit.
WNFUSED_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;"); }

// Waits until at most `kPending` of this thread's groups are on their way.
template <int kPending>
WNFUSED_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8, 16 bytes.
WNFUSED_DEVICE void load_matrices(uint32_t (&r)[4], const char* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

WNFUSED_DEVICE void load_matrices_transposed(uint32_t (&r)[4], const char* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

// c += a b on a 16x16 by 16x8 tile of bf16, sums in fp32.
WNFUSED_DEVICE void multiply_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c += a b on a 16x8 by 8x8 tile of tf32, sums in fp32. The low 13 bits of an operand are ignored.
WNFUSED_DEVICE void multiply_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two values rounded to bf16, `low` in the low half.
WNFUSED_DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Likewise of what is positive or NaN, and zeros, which are positive, for the rest. NaN comes out as 0x7fff.
WNFUSED_DEVICE uint32_t pack_rectified_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// The value where it is positive or NaN, else zero.
WNFUSED_DEVICE float rectified(float value) {
  float result;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(value));
  return result;
}

WNFUSED_DEVICE float float_of_bits(uint32_t bits) { return __uint_as_float(bits); }
WNFUSED_DEVICE uint32_t bits_of_float(float value) { return __float_as_uint(value); }

WNFUSED_DEVICE float round_to_tf32(float value) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
  return __uint_as_float(rounded);
}

// Storage types, and the types that sums are taken in.
using Half = __half;
using BFloat = __nv_bfloat16;
WNFUSED_HOST_DEVICE inline float widen(float value) { return value; }
WNFUSED_HOST_DEVICE inline double widen(double value) { return value; }
WNFUSED_HOST_DEVICE inline float widen(Half value) { return __half2float(value); }
WNFUSED_HOST_DEVICE inline float widen(BFloat value) { return __bfloat162float(value); }

template <class T, class Wide>
WNFUSED_DEVICE T narrow(Wide value) {
  return static_cast<T>(value);
}

// The sum over a warp, the same in every lane; a fixed order of additions.
template <class T>
WNFUSED_DEVICE T warp_sum(T value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}

WNFUSED_DEVICE float square_root(float value) { return __fsqrt_rn(value); }
WNFUSED_DEVICE double square_root(double value) { return __dsqrt_rn(value); }

}  // namespace wnfused::gpu

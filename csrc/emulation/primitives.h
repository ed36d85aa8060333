// The primitives of cuda/primitives.h on the emulated machine.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "emulation/machine.h"

#define WNFUSED_DEVICE inline
#define WNFUSED_HOST_DEVICE

namespace wnfused::gpu {

using emulation::Machine;

inline int thread_index() { return Machine::current().thread(); }
inline int lane_index() { return Machine::current().lane(); }
inline int block_index() { return Machine::current().block(); }
inline int computed_again(int value) { return value; }
inline void block_barrier() { Machine::current().barrier(); }

template <class T>
T load_shared(const char* address) {
  Machine::current().read_shared(address, sizeof(T));
  T value;
  std::memcpy(&value, address, sizeof(T));
  return value;
}

template <class T>
void store_shared(char* address, T value) {
  Machine::current().write_shared(address, sizeof(T));
  std::memcpy(address, &value, sizeof(T));
}

template <class T>
T load_global(const void* address) {
  Machine::current().read_global(address, sizeof(T));
  T value;
  std::memcpy(&value, address, sizeof(T));
  return value;
}

template <class T>
T load_own(const void* address) {
  return load_global<T>(address);
}

template <class T>
void store_global(void* address, T value) {
  Machine::current().write_global(address, sizeof(T));
  std::memcpy(address, &value, sizeof(T));
}

struct alignas(16) Bytes16 {
  uint32_t word[4];
};

struct alignas(8) FloatPair {
  float low, high;
};

inline void copy_async(char* shared, const void* global, bool valid = true) {
  Machine::current().copy_async(shared, global, valid);
}
inline void commit_copies() { Machine::current().commit_copies(); }

template <int kPending>
void wait_copies() {
  Machine::current().wait_copies(kPending);
}

void load_matrices(uint32_t (&r)[4], const char* row);
void load_matrices_transposed(uint32_t (&r)[4], const char* row);
void multiply_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void multiply_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// sum + <x, y> as matrix instructions add it: products are exact, and the sum of all is rounded toward zero. GPUs also
// drop what the single terms have more than two bits below the largest one's last (A100 to B200: Khattak & Mikaitis
// 2025, arXiv 2512.07004), which is little beside it.
inline float add_products(float sum, const float* x, const float* y, int depth) {
  double exact = sum;
  for (int k = 0; k < depth; ++k) exact += static_cast<double>(x[k]) * y[k];
  const float nearest = static_cast<float>(exact);
  return std::isfinite(nearest) && std::abs(nearest) > std::abs(exact) ? std::nextafter(nearest, 0.0f) : nearest;
}

// Round to nearest, ties to even; a NaN stays one.
inline uint32_t pack_bf16(float low, float high) {
  const auto round = [](float value) -> uint32_t {
    const uint32_t bits = bits_of_float(value);
    if (std::isnan(value)) return 0x7fff;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  };
  return round(low) | round(high) << 16;
}
inline float rectified(float value) { return value <= 0.0f ? 0.0f : value; }
inline uint32_t pack_rectified_bf16(float low, float high) { return pack_bf16(rectified(low), rectified(high)); }

// Round to nearest, ties away from zero.
inline float round_to_tf32(float value) {
  return std::isfinite(value) ? float_of_bits((bits_of_float(value) + 0x1000) & ~0x1fffu) : value;
}

using Half = _Float16;
struct BFloat {
  uint16_t bits;
};
inline float widen(float value) { return value; }
inline double widen(double value) { return value; }
inline float widen(Half value) { return static_cast<float>(value); }
inline float widen(BFloat value) { return float_of_bits(static_cast<uint32_t>(value.bits) << 16); }

template <class T, class Wide>
T narrow(Wide value) {
  if constexpr (std::is_same_v<T, BFloat>)
    return {static_cast<uint16_t>(pack_bf16(value, 0.0f))};
  else
    return static_cast<T>(value);
}

float warp_sum(float value);
double warp_sum(double value);

inline float square_root(float value) { return std::sqrt(value); }
inline double square_root(double value) { return std::sqrt(value); }

}  // namespace wnfused::gpu

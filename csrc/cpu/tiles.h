// The tile registers of AMX and the five instructions on them that the kernels use, twice: as instructions, and in plain
// C++ with the same results bit for bit (NaN payloads aside), so that one kernel runs on both.
//
//   a tile: up to 16 rows of up to 64 bytes            dot:  C[m][n] += sum_k A[m][k] B[k][n]
//   A  16 rows x 32 bfloat16                           over pairs: B's row k holds, for each n, the elements of depth
//   B  16 rows x 16 pairs of bfloat16                  2k and 2k + 1 side by side
//   C  16 rows x 16 floats
//
// The arithmetic (Intel's manual, TDPBF16PS): products at even and at odd depth are summed apart by fused multiply-adds
// from zero; the two sums are added, then added to C; everything rounds to nearest even, denormals are read as zero and
// flushed to zero.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace wnfused::cpu::tiles {

constexpr int kRows = 16;
constexpr int kRowBytes = 64;
constexpr int kDepth = 32;  // bfloat16 elements of a row of A

// LDTILECFG's operand.
struct alignas(64) Configuration {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

#if defined(__x86_64__)

class Amx {
 public:
  static void configure(const Configuration& configuration) {
    asm volatile("ldtilecfg %0" : : "m"(configuration));
  }
  static void release() { asm volatile("tilerelease"); }

  template <int T>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(T));
  }
  template <int T>
  static void load(const void* rows, int64_t stride_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride_bytes), "i"(T) : "memory");
  }
  template <int T>
  static void store(void* rows, int64_t stride_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(stride_bytes), "i"(T) : "memory");
  }
  template <int C, int A, int B>
  static void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
};

#endif  // __x86_64__

class Emulated {
 public:
  static void configure(const Configuration& configuration) {
    state().configuration = configuration;
    std::memset(state().tile, 0, sizeof state().tile);
  }
  static void release() { configure({}); }

  template <int T>
  static void zero() {
    std::memset(state().tile[T], 0, sizeof state().tile[T]);
  }
  template <int T>
  static void load(const void* rows, int64_t stride_bytes) {
    zero<T>();
    for (int r = 0; r < state().configuration.rows[T]; ++r)
      std::memcpy(state().tile[T][r], static_cast<const char*>(rows) + r * stride_bytes,
                  state().configuration.row_bytes[T]);
  }
  template <int T>
  static void store(void* rows, int64_t stride_bytes) {
    for (int r = 0; r < state().configuration.rows[T]; ++r)
      std::memcpy(static_cast<char*>(rows) + r * stride_bytes, state().tile[T][r],
                  state().configuration.row_bytes[T]);
  }
  template <int C, int A, int B>
  static void dot() {
    const Configuration& configuration = state().configuration;
    const int pairs = configuration.row_bytes[A] / 4, columns = configuration.row_bytes[C] / 4;
    for (int m = 0; m < configuration.rows[C]; ++m) {
      double even[kRows] = {}, odd[kRows] = {};
      for (int k = 0; k < pairs; ++k) {
        const double a0 = element(state().tile[A][m], 2 * k), a1 = element(state().tile[A][m], 2 * k + 1);
        for (int n = 0; n < columns; ++n) {
          even[n] = rounded(even[n] + a0 * element(state().tile[B][k], 2 * n));
          odd[n] = rounded(odd[n] + a1 * element(state().tile[B][k], 2 * n + 1));
        }
      }
      for (int n = 0; n < columns; ++n) {
        float sum;
        std::memcpy(&sum, &state().tile[C][m][4 * n], sizeof sum);
        sum = static_cast<float>(rounded(rounded(sum) + rounded(even[n] + odd[n])));
        std::memcpy(&state().tile[C][m][4 * n], &sum, sizeof sum);
      }
    }
  }

 private:
  struct State {
    Configuration configuration;
    unsigned char tile[8][kRows][kRowBytes];
  };

  static State& state() {
    thread_local State state;
    return state;
  }

  static double element(const unsigned char* row, int index) {
    uint16_t value;
    std::memcpy(&value, row + 2 * index, sizeof value);
    if ((value & 0x7f80) == 0) value &= 0x8000;
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
  }

  // A sum of a float and a product of two bfloat16 is rounded once: its rounding to double, whose 53 bits exceed twice
  // 24 by more than 2, does not change the rounding to float. Denormals are flushed after rounding.
  static double rounded(double value) {
    constexpr double kSmallest = 0x1p-126, kRoundsUp = 0x1p-126 - 0x1p-151;
    const double size = std::fabs(value);
    if (size < kSmallest) return std::copysign(size < kRoundsUp ? 0.0 : kSmallest, value);
    return static_cast<float>(value);
  }
};

}  // namespace wnfused::cpu::tiles

// The tile registers of AMX and the six instructions on them that the kernels use, twice: as instructions, and in plain
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

// A core's two halves share the unit that multiplies tiles. While the other one is busy, products and loads that follow
// one another without a pause take 62 cycles a product instead of 16, with eight instructions that do nothing behind
// each 45; a half that is alone does not notice them (a loop of 2x2 tiles, measured on a Xeon of 2024, bench/NOTES.md).
#define WNFUSED_TILE_PAUSE "\n\t.rept 8\n\tnop\n\t.endr"

class Amx {
 public:
  static void configure(const Configuration& configuration) {
    asm volatile("ldtilecfg %0" : : "m"(configuration));
  }
  static void release() { asm volatile("tilerelease"); }

  // Whether the core's other half was busy when this thread looked last, so many calls ago or fewer. What tiles hold is
  // lost.
  static bool is_contended() {
    constexpr int kBetween = 1 << 9;
    thread_local int left = 0;
    thread_local bool contended = false;
    if (--left < 0) {
      contended = takes_long();
      left = kBetween;
    }
    return contended;
  }

  // The unit sleeps after a third of a microsecond without a product, and wakes as long: loops that leave it idle call
  // this more often. What tile 0 holds is lost.
  static void keep_awake() { asm volatile("tdpbf16ps %tmm2, %tmm1, %tmm0"); }

  template <int T>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(T));
  }
  template <int T>
  static void load(const void* rows, int64_t stride_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" WNFUSED_TILE_PAUSE
                 :
                 : "r"(rows), "r"(stride_bytes), "i"(T)
                 : "memory");
  }
  template <int T>
  static void store(void* rows, int64_t stride_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(stride_bytes), "i"(T) : "memory");
  }
  template <int C, int A, int B>
  static void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" WNFUSED_TILE_PAUSE : : "i"(C), "i"(A), "i"(B));
  }

 private:
  // 32 products one behind the other, 16 cycles each, against as many cycles of integer multiplications. As many before
  // them wake the unit.
  static bool takes_long() {
    zero<0>(), zero<1>(), zero<2>();
    int chain = 1;
    asm volatile(".rept 32\n\ttdpbf16ps %%tmm2, %%tmm1, %%tmm0\n\t.endr\n\tlfence" : : : "memory");
    const uint64_t begin = __builtin_ia32_rdtsc();
    asm volatile(".rept 32\n\ttdpbf16ps %%tmm2, %%tmm1, %%tmm0\n\t.endr\n\tlfence" : : : "memory");
    const uint64_t middle = __builtin_ia32_rdtsc();
    asm volatile(".rept 171\n\timul %0, %0\n\t.endr\n\tlfence" : "+r"(chain) : : "memory");
    return 2 * (middle - begin) > 3 * (__builtin_ia32_rdtsc() - middle);
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

  // Every other time, so that tests meet both.
  static bool is_contended() {
    thread_local bool contended = false;
    return contended = !contended;
  }
  static void keep_awake() {}

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
    float b[2][kRows][kRows];  // even and odd depth apart
    bool ordinary = true;
    for (int k = 0; k < pairs; ++k)
      for (int n = 0; n < columns; ++n)
        for (int i = 0; i < 2; ++i) b[i][k][n] = element(state().tile[B][k], 2 * n + i, ordinary);
    for (int m = 0; m < configuration.rows[C]; ++m) {
      float a[2][kRows];
      bool all_ordinary = ordinary;
      for (int k = 0; k < pairs; ++k)
        for (int i = 0; i < 2; ++i) a[i][k] = element(state().tile[A][m], 2 * k + i, all_ordinary);
      float sum[2][kRows] = {};
      for (int i = 0; i < 2; ++i)
        for (int k = 0; k < pairs; ++k) {
          if (all_ordinary) {
            for (int n = 0; n < columns; ++n) sum[i][n] += a[i][k] * b[i][k][n];
          } else {
            for (int n = 0; n < columns; ++n)
              sum[i][n] = rounded(static_cast<double>(a[i][k]) * b[i][k][n] + sum[i][n]);
          }
        }
      for (int n = 0; n < columns; ++n) {
        float total;
        std::memcpy(&total, &state().tile[C][m][4 * n], sizeof total);
        const float both = rounded(static_cast<double>(sum[0][n]) + sum[1][n]);
        total = rounded(static_cast<double>(rounded(total)) + both);
        std::memcpy(&state().tile[C][m][4 * n], &total, sizeof total);
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

  // The bfloat16 at `index`; clears `ordinary` unless it is 0 or its size lies between 2^-50 and 2^50. Products of
  // ordinary elements are exact in float and multiples of 2^-114, hence so are their sums: no rounding but that of each
  // sum, no denormal, and float arithmetic is fused multiply-add.
  static float element(const unsigned char* row, int index, bool& ordinary) {
    uint16_t value;
    std::memcpy(&value, row + 2 * index, sizeof value);
    const int exponent = value >> 7 & 0xff;
    if (exponent == 0) value &= 0x8000;
    ordinary = ordinary && (exponent == 0 || (exponent > 127 - 50 && exponent < 127 + 50));
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
  }

  // A float plus a product of two bfloat16 is rounded once: double's 53 bits exceed twice float's 24 by more than 2, so
  // that rounding to double first changes nothing. Denormals are flushed after rounding.
  static float rounded(double value) {
    constexpr double kSmallest = 0x1p-126, kRoundsUp = 0x1p-126 - 0x1p-151;
    const double size = std::fabs(value);
    if (size < kSmallest) return static_cast<float>(std::copysign(size < kRoundsUp ? 0.0 : kSmallest, value));
    return static_cast<float>(value);
  }
};

}  // namespace wnfused::cpu::tiles

// The processor's peak: multiply-adds on registers alone, on all of torch's threads. What a kernel's rate is held
// against.
//
//   cpu_peak_flops(bool bfloat16) -> float     FLOP/s, two a multiply-add
//
// 24 independent accumulators hide the latency (4 cycles at up to 3 a cycle on today's cores) and leave registers for
// the two factors. bfloat16 counts the instruction that the kernels multiply it with: TDPBF16PS on four accumulators,
// or VDPBF16PS, two products a lane, or none but float's.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu/machine/amx_tiles.h"
#include "cpu/machine/isa.h"
#include "cpu/machine/parallel.h"

namespace wnfused::cpu {
namespace {

constexpr int kAccumulators = 24;
constexpr int64_t kRounds = 200000;

// Keeps a value, and what computed it, from being optimised away.
template <typename T>
void keep(T& value) {
  asm volatile("" : : "m"(value) : "memory");
}

// Runs kRounds rounds of multiply-adds on one thread and returns their FLOPs.
#define WNFUSED_PEAK_LOOP(Vector, zero, one, multiply_add, flops_each) \
  Vector sum[kAccumulators];                                           \
  for (auto& s : sum) s = zero;                                        \
  const Vector a = one, b = one;                                       \
  for (int64_t round = 0; round < kRounds; ++round) {                  \
    _Pragma("GCC unroll 24") for (auto& s : sum) s = multiply_add;     \
  }                                                                    \
  Vector total = zero;                                                 \
  for (auto& s : sum) total += s;                                      \
  keep(total);                                                         \
  return double(kRounds) * kAccumulators * (flops_each)

#if defined(__x86_64__)
__attribute__((target("avx512f"))) double fp32_avx512() {
  WNFUSED_PEAK_LOOP(__m512, _mm512_setzero_ps(), _mm512_set1_ps(1e-3f), _mm512_fmadd_ps(a, b, s), 32);
}

__attribute__((target("avx2,fma"))) double fp32_avx2() {
  constexpr int kAccumulators = 12;  // of 16 registers
  WNFUSED_PEAK_LOOP(__m256, _mm256_setzero_ps(), _mm256_set1_ps(1e-3f), _mm256_fmadd_ps(a, b, s), 16);
}

__attribute__((target("avx512f,avx512bf16"))) double bf16_avx512() {
  WNFUSED_PEAK_LOOP(__m512, _mm512_setzero_ps(), _mm512_set1_ps(1e-3f),
                    _mm512_dpbf16_ps(s, (__m512bh)a, (__m512bh)b), 64);
}

double bf16_amx() {
  using Tiles = tiles::Amx;
  Tiles::configure({});
  for (int64_t round = 0; round < kRounds; ++round) {
    Tiles::dot<0, 4, 6>();
    Tiles::dot<1, 4, 7>();
    Tiles::dot<2, 5, 6>();
    Tiles::dot<3, 5, 7>();
  }
  Tiles::release();
  return double(kRounds) * 4 * 2 * tiles::kRows * tiles::kRows * tiles::kDepth;
}
#endif

typedef float Four __attribute__((vector_size(16)));

double fp32_portable() {
  constexpr int kAccumulators = 12;
  const Four thousandth = {1e-3f, 1e-3f, 1e-3f, 1e-3f};
  WNFUSED_PEAK_LOOP(Four, Four{}, thousandth, a * b + s, 8);
}

using Loop = double (*)();

Loop peak_loop(bool bfloat16) {
#if defined(__x86_64__)
  if (bfloat16 && active_pair_products() == PairProducts::kTiles) return bf16_amx;
  if (bfloat16 && active_pair_products() == PairProducts::kDots) return bf16_avx512;
  if (active_isa() == Isa::kAvx512) return fp32_avx512;
  if (active_isa() == Isa::kAvx2) return fp32_avx2;
#endif
  (void)bfloat16;
  return fp32_portable;
}

double cpu_peak_flops(bool bfloat16) {
  const Loop loop = peak_loop(bfloat16);
  const int64_t threads = worker_limit();
  double best = 0;
  for (int attempt = 0; attempt < 3; ++attempt) {
    const auto start = std::chrono::steady_clock::now();
    double flops = 0;
    share_out(0, threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const double mine = loop();
        if (i == 0) flops = mine * static_cast<double>(threads);
      }
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, flops / seconds.count());
  }
  return best;
}

}  // namespace
}  // namespace wnfused::cpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CompositeExplicitAutograd, library) {
  library.impl("cpu_peak_flops", TORCH_BOX(&wnfused::cpu::cpu_peak_flops));
}

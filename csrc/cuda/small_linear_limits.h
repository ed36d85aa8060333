// Which linear layers the CUDA kernels for few samples take (small_linear.h), for those who ask them.
// Nothing of CUDA here.
#pragma once

#include <cstdint>

namespace wnfused {

// Samples that the weight gradient keeps dy of in shared memory, columns that it keeps dw of in registers, and rows
// that a block of the input gradient walks in some 10 us.
constexpr int64_t kMostSmallSamples = 256, kMostSmallColumns = 4096, kMostSmallRows = 4096;

// The kernels count entries in 32 bits, up to some rows past the last ones.
static_assert((kMostSmallRows + 1024) * kMostSmallColumns < (int64_t{1} << 31));
static_assert((kMostSmallSamples + 1024) * kMostSmallColumns < (int64_t{1} << 31));

// Rows are read four neighbours at a time, columns eight.
constexpr int64_t kSmallRowStep = 4, kSmallColumnStep = 8;

}  // namespace wnfused

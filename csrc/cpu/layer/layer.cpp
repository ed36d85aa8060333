// The choice of instruction set, and the passes over z on all threads.
#include "cpu/layer/layer.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu/layer/passes.h"
#include "cpu/machine/isa.h"

namespace wnfused::cpu {

const LayerKernels& layer_kernels() {
  switch (active_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return avx512::layer_kernels;
    case Isa::kAvx2:
      return avx2::layer_kernels;
#endif
    default:
      return portable::layer_kernels;
  }
}

bool run_epilogue(const Lines& lines, const Epilogue& task) {
  std::atomic<bool> finite{true};
  for_rows(lines.begin, lines.end, lines.length, [&](int64_t begin, int64_t end) {
    if (!layer_kernels().epilogue({lines.columns, begin, end, lines.length, lines.channels}, task)) finite = false;
  });
  return finite;
}

void run_mask(const Lines& lines, const Mask& task, float* bias_gradient) {
  const int64_t count = lines.end;
  if (!lines.columns) {
    std::vector<float> sums(bias_gradient ? count : 0);
    Mask part = task;
    part.bias_gradient = bias_gradient ? sums.data() : nullptr;
    for_rows(0, count, lines.length, [&](int64_t begin, int64_t end) {
      layer_kernels().mask({false, begin, end, lines.length, lines.channels}, part);
    });
    for (int64_t c = 0; bias_gradient && c < lines.channels; ++c) {
      float sum = 0;
      for (int64_t line = c; line < count; line += lines.channels) sum += sums[line];
      bias_gradient[c] = sum;
    }
    return;
  }
  // Chunks of lines, each with a partial sum of its own.
  constexpr int64_t kMaxChunks = 64;
  const int64_t chunk = std::max<int64_t>(
      {kGrain / std::max<int64_t>(lines.length, 1), (count + kMaxChunks - 1) / kMaxChunks, 1});
  const int64_t chunks = (count + chunk - 1) / chunk;
  std::vector<float> sums(bias_gradient && chunks > 1 ? chunks * lines.length : 0);
  if (bias_gradient) std::fill(bias_gradient, bias_gradient + lines.length, 0.0f);
  const auto run = [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) {
      Mask part = task;
      part.bias_gradient = !bias_gradient ? nullptr : chunks > 1 ? sums.data() + c * lines.length : bias_gradient;
      layer_kernels().mask({true, c * chunk, std::min(count, (c + 1) * chunk), lines.length, lines.channels}, part);
    }
  };
  share_out(0, chunks, 1, run);
  for (size_t at = 0; at < sums.size(); ++at) bias_gradient[at % lines.length] += sums[at];
}

}  // namespace wnfused::cpu

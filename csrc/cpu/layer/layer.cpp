// The choice of instruction set, and the passes over z on all threads.
#include "cpu/layer/layer.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

#include "cpu/layer/formats.h"
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

namespace {

// Pixels, or rows, of few channels put together until a line is whole blocks; those that are left over.
//
//      abc abc abc ... abc | abc abc      16 of 3 channels are a line of 48; scale and bias are repeated as often
struct Together {
  int64_t times;
  Lines whole, rest;

  explicit Together(const Lines& lines) : times(times_of(lines)) {
    const int64_t length = times * lines.length, count = lines.end / times;
    whole = {lines.columns, 0, count, length, lines.columns ? length : lines.channels};
    rest = {lines.columns, count * times, lines.end, lines.length, lines.channels};
  }

  // Where more than one line is put together; else `values`.
  const float* repeated(const float* values, std::vector<float>& held) const {
    if (!values || times == 1) return values;
    held.resize(whole.length);
    for (int64_t at = 0; at < whole.length; ++at) held[at] = values[at % rest.length];
    return held.data();
  }

 private:
  static int64_t times_of(const Lines& lines) {
    constexpr int64_t kMany = 64;  // channels of whose last block few lanes are empty
    if (!lines.columns || lines.length == 0 || lines.length >= kMany) return 1;
    const int64_t times = kLanes / std::gcd(lines.length, kLanes);
    return lines.end < times ? 1 : times;
  }
};

bool run_epilogue_lines(const Lines& lines, const Epilogue& task) {
  std::atomic<bool> finite{true};
  for_rows(lines.begin, lines.end, lines.length, [&](int64_t begin, int64_t end) {
    if (!layer_kernels().epilogue({lines.columns, begin, end, lines.length, lines.channels}, task)) finite = false;
  });
  return finite;
}

void run_mask_planes(const Lines& lines, const Mask& task, float* bias_gradient) {
  const int64_t count = lines.end;
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
}

// A chunk of lines whose sum is added to, piece by piece: a sum rounds as often as a piece has lines and the chunk
// pieces.
void mask_chunk(const Lines& lines, const Mask& task, float* bias_gradient) {
  constexpr int64_t kPiece = 256;
  Mask part = task;
  part.bias_gradient = bias_gradient;
  if (!bias_gradient || lines.end - lines.begin <= kPiece) return layer_kernels().mask(lines, part);
  std::vector<float> sums(lines.length);
  part.bias_gradient = sums.data();
  for (int64_t begin = lines.begin; begin < lines.end; begin += kPiece) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    layer_kernels().mask({true, begin, std::min(begin + kPiece, lines.end), lines.length, lines.channels}, part);
    for (int64_t i = 0; i < lines.length; ++i) bias_gradient[i] += sums[i];
  }
}

// Chunks of lines, each with a partial sum of its own. The bias gradient is added to.
void run_mask_columns(const Lines& lines, const Mask& task, float* bias_gradient) {
  constexpr int64_t kMaxChunks = 64;
  const int64_t count = lines.end;
  const int64_t chunk = std::max<int64_t>(
      {kGrain / std::max<int64_t>(lines.length, 1), (count + kMaxChunks - 1) / kMaxChunks, 1});
  const int64_t chunks = (count + chunk - 1) / chunk;
  std::vector<float> sums(bias_gradient && chunks > 1 ? chunks * lines.length : 0);
  const auto run = [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) {
      float* sum = !bias_gradient ? nullptr : chunks > 1 ? sums.data() + c * lines.length : bias_gradient;
      mask_chunk({true, c * chunk, std::min(count, (c + 1) * chunk), lines.length, lines.channels}, task, sum);
    }
  };
  share_out(0, chunks, 1, run);
  for (size_t at = 0; at < sums.size(); ++at) bias_gradient[at % lines.length] += sums[at];
}

}  // namespace

bool run_epilogue(const Lines& lines, const Epilogue& given) {
  const Together together(lines);
  std::vector<float> scale, bias;
  Epilogue task = given;
  task.scale = together.repeated(given.scale, scale);
  task.bias = together.repeated(given.bias, bias);
  const bool finite = run_epilogue_lines(together.whole, task);
  return run_epilogue_lines(together.rest, given) && finite;
}

void run_mask(const Lines& lines, const Mask& given, float* bias_gradient) {
  if (!lines.columns) return run_mask_planes(lines, given, bias_gradient);
  if (bias_gradient) std::fill(bias_gradient, bias_gradient + lines.length, 0.0f);
  const Together together(lines);
  if (together.times == 1) return run_mask_columns(lines, given, bias_gradient);
  std::vector<float> scale, sums(bias_gradient ? together.whole.length : 0);
  Mask task = given;
  task.scale = together.repeated(given.scale, scale);
  run_mask_columns(together.whole, task, bias_gradient ? sums.data() : nullptr);
  for (size_t at = 0; at < sums.size(); ++at) bias_gradient[at % lines.length] += sums[at];
  task = given;
  task.bias_gradient = bias_gradient;
  layer_kernels().mask(together.rest, task);
}

Tensor masked_gradient(const Tensor& dy, const Tensor& y, const std::optional<Tensor>& into, Activation activation,
                       float slope, float* dbias) {
  const bool masked = activation != Activation::kNone;
  const Tensor dz = !masked ? dy : into ? *into : empty_as(dy);
  const Values nothing{nullptr, is_bfloat16(dy)};
  if (masked || dbias)
    run_mask(
        lines_of(dy),
        {values_of(dy), values_of(y), masked ? values_of(dz) : nothing, nothing, nullptr, nullptr, activation, slope},
        dbias);
  return dz;
}

}  // namespace wnfused::cpu

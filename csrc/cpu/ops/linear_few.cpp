// A linear layer of floats with few features or few inputs (linear/few.h), and how its rows are shared out.
#include <algorithm>
#include <atomic>
#include <functional>
#include <vector>

#include "cpu/layer/gains.h"
#include "cpu/layer/passes.h"
#include "cpu/linear/few.h"
#include "cpu/machine/parallel.h"
#include "cpu/ops/linear_routes.h"

namespace wnfused::cpu {
namespace {

bool has_few_features(const LinearShape& shape) { return shape.features <= kFew && shape.inner > kFew; }
bool has_few_inputs(const LinearShape& shape) { return shape.inner <= kFew && shape.features >= kLanes; }

bool takes(const LinearShape& shape, const Tensor& x, const Tensor& v) {
  return x.scalar_type() == ScalarType::Float && v.scalar_type() == ScalarType::Float && !shape.is_empty();
}

// scale v, or v itself; [features, inner], or turned.
std::vector<float> copy_of(const LinearShape& shape, const float* v, const float* scale, bool turned) {
  std::vector<float> copy(shape.features * shape.inner);
  for (int64_t n = 0; n < shape.features; ++n)
    for (int64_t k = 0; k < shape.inner; ++k)
      copy[turned ? k * shape.features + n : n * shape.inner + k] = (scale ? scale[n] : 1.0f) * v[n * shape.inner + k];
  return copy;
}

// Into how many shares the rows are divided: as many as are worth a worker, by the shape alone, so that the bits do not
// depend on the number of threads.
int64_t shares_of(const LinearShape& shape) {
  constexpr int64_t kMost = 16, kLeastRows = 32, kWorkEach = int64_t{1} << 17;  // multiply-adds
  constexpr int64_t kMask = 2;  // what an entry of dy costs beside its products
  const int64_t worth = shape.rows * shape.features * (shape.inner + kMask) / kWorkEach;
  return std::clamp<int64_t>(std::min(worth, shape.rows / kLeastRows), 1, kMost);
}

// What few_kernels() add up a share of the rows at a time, and for each a piece at a time: a sum rounds as often as a
// piece has rows and the share pieces. Shares are added up in their order.
class Sums {
 public:
  // rows: of the largest share.
  Sums(int64_t shares, int64_t rows, int64_t entries)
      : entries_(entries), sums_(shares * entries), pieces_(rows > kPiece ? shares * entries : 0) {}

  // run(begin, end, sums) over the pieces of a share's rows.
  template <class Run>
  void add(int64_t share, int64_t begin, int64_t end, const Run& run) {
    float* sum = sums_.data() + share * entries_;
    if (end - begin <= kPiece) return run(begin, end, sum);
    float* piece = pieces_.data() + share * entries_;
    for (int64_t m = begin; m < end; m += kPiece) {
      std::fill(piece, piece + entries_, 0.0f);
      run(m, std::min(m + kPiece, end), piece);
      std::transform(sum, sum + entries_, piece, sum, std::plus<float>());
    }
  }

  float* total() {
    for (size_t at = entries_; at < sums_.size(); ++at) sums_[at % entries_] += sums_[at];
    return sums_.data();
  }

 private:
  static constexpr int64_t kPiece = 256;
  int64_t entries_;
  std::vector<float> sums_, pieces_;
};

}  // namespace

// Measured beside the vendor's products and panels (bench/NOTES.md).
bool are_few(const LinearCall& call) { return takes(call.shape, call.x, call.v) && has_few_features(call.shape); }

bool are_few(const LinearGradient& call) {
  return takes(call.shape, call.x, call.v) && (has_few_features(call.shape) || has_few_inputs(call.shape));
}

bool linear_by_few(const LinearCall& call) {
  const auto [rows, inner, features] = call.shape;
  std::vector<float> held, weight, scale;
  row_norms(call.v, call.norms, 0, features);
  scale = scales_of(call.gain, call.norms, features);
  FewForward task{inner, features, entries<float>(call.x), entries<float>(call.v), scale.data(), call.bias,
                  call.residual ? floats_of(*call.residual, held) : nullptr,
                  static_cast<float*>(call.y.mutable_data_ptr()), call.activation, call.slope};
  if (!all_can_wait(scale)) {
    weight = copy_of(call.shape, task.v, task.scale, false);
    task.v = weight.data();
    std::fill(scale.begin(), scale.end(), 1.0f);
  }
  std::atomic<bool> finite{true};
  for_rows(0, rows, features * inner, [&](int64_t begin, int64_t end) {
    if (!few_kernels().features(task, begin, end)) finite = false;
  });
  return finite;
}

void linear_by_few_backward(const LinearGradient& call, const Tensor& dy, const Tensor& y, Activation activation,
                            float slope, const std::optional<Tensor>& dz, float* dbias) {
  const int64_t rows = call.shape.rows, inner = call.shape.inner, features = call.shape.features;
  const bool turned = has_few_inputs(call.shape);
  const auto kernel = turned ? few_kernels().inputs_backward : few_kernels().features_backward;
  const std::vector<float> scale = scales_of(call.gain, call.norms, features);
  const float* v = entries<float>(call.v);
  std::vector<float> weight;
  if (turned && call.dx) weight = copy_of(call.shape, v, scale.data(), true);
  const auto out = [](const std::optional<Tensor>& t) {
    return t ? static_cast<float*>(t->mutable_data_ptr()) : nullptr;
  };
  const FewBackward task{inner, features, entries<float>(call.x), turned ? weight.data() : v, scale.data(),
                         entries<float>(dy), entries<float>(y), activation, slope, out(call.dx), out(dz),
                         nullptr, nullptr};
  const int64_t weights = call.dv ? features * inner : 0, shares = shares_of(call.shape);
  Sums sums(shares, divide_up(rows, shares), weights + features);
  share_out(0, shares, 1, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s)
      sums.add(s, rows * s / shares, rows * (s + 1) / shares, [&](int64_t begin, int64_t end, float* sum) {
        FewBackward part = task;
        if (call.dv) part.dw = sum;
        if (dbias) part.dbias = sum + weights;
        kernel(part, begin, end);
      });
  });
  float* total = sums.total();
  if (dbias) std::copy_n(total + weights, features, dbias);
  if (!call.dv) return;
  float* dv = out(call.dv);
  if (turned) {
    const std::vector<float> columns = copy_of(call.shape, v, nullptr, true);
    few_kernels().inputs_gradient({inner, features, columns.data(), scale.data(), call.norms, total, call.dgain});
    for (int64_t n = 0; n < features; ++n)
      for (int64_t k = 0; k < inner; ++k) dv[n * inner + k] = total[k * features + n];
    return;
  }
  const Values dw{total, false};
  layer_kernels().gradient({0, features, inner}, {dw, values_of(call.v), values_of(*call.dv), call.gain, call.norms,
                                                  call.dgain, false, 1, nullptr});
}

}  // namespace wnfused::cpu

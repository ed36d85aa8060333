// Row norm, forward and backward, of one tensor or of all tensors of a model in one call.
//
//   data     v [outer, rows, inner], in the order of its memory: row r is the set of all v[o, r, i]
//   runs     outer = 1, rows along dim 0: each row is one run of memory, and all rows of all tensors of a call are
//            shared out among the threads in pieces of whole rows
//   columns  outer > 1: lines of rows * inner entries, summed column by column in chunks of lines that the shape
//            decides
//   whole    one norm over the tensor: its memory in pieces
//   sums     folded in an order that depends on neither the number of threads nor on the tensors beside; float for
//            narrow types, double for double. float16 is widened and rounded at the ends.
//
// Floor: forward v read and w written, backward dw and v read and dv written: memory's time, the arithmetic is free.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <type_traits>

#include "cpu/layer/formats.h"
#include "cpu/layer/gains.h"
#include "cpu/layer/tensor.h"
#include "cpu/machine/parallel.h"
#include "ops.h"

namespace wnfused {
namespace {

using namespace cpu;

struct RowLayout {
  int64_t outer, rows, inner;
};

// The dims but for those of a single entry, from far apart in memory to side by side.
std::vector<int64_t> order_of_memory(const Tensor& v) {
  std::vector<int64_t> order;
  for (int64_t d = 0; d < v.dim(); ++d)
    if (v.size(d) != 1) order.push_back(d);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return v.stride(a) > v.stride(b); });
  return order;
}

// Whether the entries are one run of memory, whatever the order of the dims.
bool is_dense(const Tensor& v) {
  if (v.is_contiguous()) return true;
  const std::vector<int64_t> order = order_of_memory(v);
  int64_t entries = 1;
  for (auto d = order.rbegin(); d != order.rend(); entries *= v.size(*d++))
    if (v.stride(*d) != entries) return false;
  return true;
}

RowLayout rows_of(const Tensor& v, int64_t dim) {
  if (dim < 0) return {1, 1, v.numel()};
  STD_TORCH_CHECK(dim < v.dim(), "weight_norm: dim ", dim, " is out of range for a tensor of ", v.dim(), " dims");
  if (v.size(dim) == 1) return {1, 1, v.numel()};
  int64_t outer = 1, inner = 1;
  for (int64_t d : order_of_memory(v))
    if (d != dim) (v.stride(d) > v.stride(dim) ? outer : inner) *= v.size(d);
  return {outer, v.size(dim), inner};
}

template <class T>
const auto& kernels() {
  if constexpr (std::is_same_v<T, double>) return layer_kernels().norms_of_doubles;
  else if constexpr (std::is_same_v<T, float>) return layer_kernels().norms_of_floats;
  else return layer_kernels().norms_of_bfloat16;
}

// One tensor's part of a call. Forward: w and scale may be null, norm is written. Backward, which has dgain to write: w
// is dv, norm is read.
template <class T, class W>
struct Task {
  RowLayout shape;
  const T *v, *dw;
  T* w;
  const W* gain;
  W *norm, *scale, *dgain;

  bool backward() const { return dgain != nullptr; }
  bool has_single_entries() const { return shape.outer * shape.inner == 1; }

  // What dv has no part along. All of a row of a single entry lies along v: of dw less itself nothing is left, of dw
  // less a multiple of v what rounding leaves, a gradient for Adam to follow.
  const T* along() const { return backward() && has_single_entries() ? dw : v; }
};

// What becomes of a row's sum: <v, v> forward, <dw, v> backward.
template <class T, class W>
struct RowFactors {
  W s, t, norm;

  RowFactors(const Task<T, W>& task, int64_t row, W sum) {
    norm = task.backward() ? task.norm[row] : std::sqrt(sum);
    const W inverse = norm == 0 ? 0 : 1 / norm;  // a zero row has no direction
    if (task.backward()) {
      const W dgain = norm == 0 ? 0 : sum * inverse;
      task.dgain[row] = dgain;
      s = task.gain[row] * inverse;
      t = task.has_single_entries() ? 1 : dgain * inverse;
    } else {
      s = norm == 0 ? 0 : task.gain[row] / norm;
      t = 0;
      task.norm[row] = norm;
      if (task.scale) task.scale[row] = s;
    }
  }
};

template <class T, class W>
void run_rows(const Task<T, W>& task, int64_t begin, int64_t end) {
  const auto& on = kernels<T>();
  const int64_t inner = task.shape.inner;
  for (int64_t row = begin; row < end; ++row) {
    const T* v = task.v + row * inner;
    const T* other = task.backward() ? task.dw + row * inner : v;
    const RowFactors<T, W> found(task, row, on.sum(other, v, inner));
    if (task.w)
      on.combine({task.backward() ? other : nullptr, task.along() + row * inner, task.w + row * inner, &found.s,
                  &found.t, &found.norm}, inner);
  }
}

template <class T, class W>
void run_columns(const Task<T, W>& task) {
  const auto& on = kernels<T>();
  const int64_t outer = task.shape.outer, rows = task.shape.rows, inner = task.shape.inner;
  const int64_t length = rows * inner;  // rows without an entry have a norm, 0, too
  constexpr int64_t kLeastChunks = 8, kMostChunks = 64, kMostSums = int64_t{1} << 14;
  const int64_t most = std::clamp(kMostSums / std::max<int64_t>(length, 1), kLeastChunks, kMostChunks);
  const int64_t least = divide_up(outer, most);
  const int64_t chunk = std::max<int64_t>({kGrain / std::max<int64_t>(length, 1), least, 1});
  const int64_t chunks = std::max<int64_t>(divide_up(outer, chunk), 1);
  const std::unique_ptr<double[]> sums(new double[chunks * length]);
  const auto in_chunks = [&](const auto& run) {
    for_rows(0, chunks, chunk * length, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) run(c, c * chunk * length, std::min(chunk, outer - c * chunk));
    });
  };
  const T* other = task.backward() ? task.dw : task.v;
  // A running sum of n equal squares errs by up to n / 2 roundings, so no run is long and runs are added in double.
  constexpr int64_t kRun = 64;
  in_chunks([&](int64_t c, int64_t at, int64_t lines) {
    std::vector<W> run(length);
    double* into = sums.get() + c * length;
    std::fill(into, into + length, 0);
    for (int64_t line = 0; line < lines; line += kRun, at += kRun * length) {
      std::fill(run.begin(), run.end(), W(0));
      on.column_sums(other + at, task.v + at, std::min(kRun, lines - line), length, run.data());
      for (int64_t i = 0; i < length; ++i) into[i] += run[i];
    }
  });
  std::vector<W> s(length), t(length), norm(length);
  for_rows(0, rows, chunks * inner, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      double sum = 0;
      for (int64_t c = 0; c < chunks; ++c)
        for (int64_t i = row * inner; i < (row + 1) * inner; ++i) sum += sums[c * length + i];
      const RowFactors<T, W> found(task, row, static_cast<W>(sum));
      for (int64_t i = row * inner; i < (row + 1) * inner; ++i) s[i] = found.s, t[i] = found.t, norm[i] = found.norm;
    }
  });
  if (!task.w) return;
  in_chunks([&](int64_t, int64_t at, int64_t lines) {
    on.column_combine(
        {task.backward() ? task.dw + at : nullptr, task.along() + at, task.w + at, s.data(), t.data(), norm.data()},
        lines, length);
  });
}

template <class T, class W>
void run_whole(const Task<T, W>& task) {
  const auto& on = kernels<T>();
  const int64_t count = task.shape.inner, pieces = std::max<int64_t>((count + kGrain - 1) / kGrain, 1);
  const T* other = task.backward() ? task.dw : task.v;
  std::vector<W> sums(pieces);
  const auto in_pieces = [&](const auto& run) {
    for_rows(0, pieces, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) run(p, p * kGrain, std::min(kGrain, count - p * kGrain));
    });
  };
  in_pieces([&](int64_t p, int64_t at, int64_t length) { sums[p] = on.sum(other + at, task.v + at, length); });
  W sum = 0;
  for (W part : sums) sum += part;
  const RowFactors<T, W> found(task, 0, sum);
  if (!task.w) return;
  in_pieces([&](int64_t, int64_t at, int64_t length) {
    on.combine({task.backward() ? task.dw + at : nullptr, task.along() + at, task.w + at, &found.s, &found.t,
                &found.norm}, length);
  });
}

// All tensors of a call, added one by one and run together.
class Batch {
 public:
  template <class T, class W>
  void add(const Task<T, W>& task, bool whole) {
    if (whole || task.shape.outer != 1) {
      alone_.push_back([task, whole] { whole ? run_whole(task) : run_columns(task); });
      return;
    }
    const int64_t share = std::max<int64_t>(kGrain / std::max<int64_t>(task.shape.inner, 1), 1);
    for (int64_t row = 0; row < task.shape.rows; row += share) {
      const int64_t end = std::min(row + share, task.shape.rows);
      pieces_.push_back([task, row, end] { run_rows(task, row, end); });
    }
    entries_ += task.shape.rows * task.shape.inner;
  }

  void run() const {
    const int64_t count = static_cast<int64_t>(pieces_.size());
    if (count > 0) for_rows(0, count, entries_ / count, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) pieces_[p]();
    });
    for (const auto& task : alone_) task();
  }

 private:
  std::vector<std::function<void()>> pieces_, alone_;
  int64_t entries_ = 0;
};

// A tensor as the kernels read it: one run of memory, float16 as float.
Tensor readable(const Tensor& given) {
  const Tensor t = is_dense(given) ? given : torch::stable::contiguous(given);
  return t.scalar_type() == ScalarType::Half ? torch::stable::to(t, ScalarType::Float) : t;
}

ScalarType wide(ScalarType type) { return type == ScalarType::Double ? ScalarType::Double : ScalarType::Float; }

template <class W>
W* numbers(const Tensor& t) {
  return static_cast<W*>(t.mutable_data_ptr());
}

// visit(T{}, W{}) with the types of a readable tensor.
template <class Visit>
void with_types(const Tensor& v, const Visit& visit) {
  switch (v.scalar_type()) {
    case ScalarType::Float: return visit(float{}, float{});
    case ScalarType::BFloat16: return visit(uint16_t{}, float{});
    case ScalarType::Double: return visit(double{}, double{});
    default: STD_TORCH_CHECK(false, "weight_norm: no kernel for this dtype");
  }
}

bool is_whole(int64_t dim) { return dim < 0; }

void check_gain(const Tensor& g, const RowLayout& shape) {
  STD_TORCH_CHECK(g.numel() == shape.rows, "weight_norm: g has ", g.numel(), " entries for ", shape.rows, " rows");
}

struct Forward {
  Tensor v, gain, w, norm, scale;
};

void add_forward(Batch& batch, Forward& f, const Tensor& given, const Tensor& g, int64_t dim, bool weights,
                 bool scales) {
  f.v = readable(given);
  const RowLayout shape = rows_of(f.v, dim);
  check_gain(g, shape);
  const ScalarType type = wide(given.scalar_type());
  const std::vector<int64_t> sizes = is_whole(dim) ? std::vector<int64_t>{} : std::vector<int64_t>{shape.rows};
  f.gain = torch::stable::contiguous(g.scalar_type() == type ? g : torch::stable::to(g, type));
  f.norm = empty(sizes, type);
  if (weights) f.w = empty_as(f.v);
  if (scales) f.scale = empty(sizes, type);
  with_types(f.v, [&](auto entry, auto number) {
    using T = decltype(entry);
    using W = decltype(number);
    batch.add(Task<T, W>{shape, entries<T>(f.v), nullptr, weights ? numbers<T>(f.w) : nullptr, entries<W>(f.gain),
                         numbers<W>(f.norm), scales ? numbers<W>(f.scale) : nullptr, nullptr}, is_whole(dim));
  });
}

Tensor rounded(const Tensor& t, const Tensor& like) {
  return t.scalar_type() == like.scalar_type() ? t : torch::stable::to(t, like.scalar_type());
}

struct Backward {
  Tensor dw, v, gain, norm, dv, dgain;
};

void add_backward(Batch& batch, Backward& b, const Tensor& dw, const Tensor& v, const Tensor& g, const Tensor& norm,
                  int64_t dim) {
  b.v = readable(v);
  const RowLayout shape = rows_of(b.v, dim);
  check_gain(g, shape);
  const ScalarType type = wide(v.scalar_type());
  STD_TORCH_CHECK(std::equal(dw.sizes().begin(), dw.sizes().end(), v.sizes().begin(), v.sizes().end()),
                  "weight_norm_backward: dw must have the shape of v");
  STD_TORCH_CHECK(norm.numel() == shape.rows && norm.is_contiguous() && norm.scalar_type() == type,
                  "weight_norm_backward: norm must match v");
  b.dw = laid_out_as(as_dtype(dw, b.v.scalar_type()), b.v);
  b.gain = torch::stable::contiguous(g.scalar_type() == type ? g : torch::stable::to(g, type));
  b.norm = norm;
  b.dv = empty_as(b.v);
  b.dgain = empty(sizes_of(g), type);
  with_types(b.v, [&](auto entry, auto number) {
    using T = decltype(entry);
    using W = decltype(number);
    batch.add(Task<T, W>{shape, entries<T>(b.v), entries<T>(b.dw), numbers<T>(b.dv), entries<W>(b.gain),
                         numbers<W>(b.norm), nullptr, numbers<W>(b.dgain)}, is_whole(dim));
  });
}

}  // namespace

std::tuple<Tensor, Tensor> weight_norm(const Tensor& v, const Tensor& g, int64_t dim) {
  Batch batch;
  Forward task;
  add_forward(batch, task, v, g, dim, true, false);
  batch.run();
  return {rounded(task.w, v), task.norm};
}

std::tuple<Tensor, Tensor> weight_norm_backward(
    const Tensor& dw, const Tensor& v, const Tensor& g, const Tensor& norm, int64_t dim) {
  Batch batch;
  Backward task;
  add_backward(batch, task, dw, v, g, norm, dim);
  batch.run();
  return {rounded(task.dv, v), rounded(task.dgain, g)};
}

std::tuple<std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>> weight_norm_many(
    const std::vector<Tensor>& v, const std::vector<Tensor>& g, int64_t dim, bool weights) {
  STD_TORCH_CHECK(v.size() == g.size(), "weight_norm_many: ", v.size(), " tensors v and ", g.size(), " gains");
  Batch batch;
  std::vector<Forward> tasks(v.size());
  for (size_t i = 0; i < v.size(); ++i) add_forward(batch, tasks[i], v[i], g[i], dim, weights, true);
  batch.run();
  std::vector<Tensor> w, norm, scale;
  for (size_t i = 0; i < v.size(); ++i) {
    if (weights) w.push_back(rounded(tasks[i].w, v[i]));
    norm.push_back(tasks[i].norm);
    scale.push_back(tasks[i].scale);
  }
  return {w, norm, scale};
}

std::tuple<std::vector<Tensor>, std::vector<Tensor>> weight_norm_many_backward(
    const std::vector<Tensor>& dw, const std::vector<Tensor>& v, const std::vector<Tensor>& g,
    const std::vector<Tensor>& norm, int64_t dim) {
  STD_TORCH_CHECK(dw.size() == v.size() && g.size() == v.size() && norm.size() == v.size(),
                  "weight_norm_many_backward: lists of different lengths");
  Batch batch;
  std::vector<Backward> tasks(v.size());
  for (size_t i = 0; i < v.size(); ++i) add_backward(batch, tasks[i], dw[i], v[i], g[i], norm[i], dim);
  batch.run();
  std::vector<Tensor> dv, dg;
  for (size_t i = 0; i < v.size(); ++i) {
    dv.push_back(rounded(tasks[i].dv, v[i]));
    dg.push_back(rounded(tasks[i].dgain, g[i]));
  }
  return {dv, dg};
}

}  // namespace wnfused

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CPU, library) {
  library.impl("weight_norm", TORCH_BOX(&wnfused::weight_norm));
  library.impl("weight_norm_backward", TORCH_BOX(&wnfused::weight_norm_backward));
  library.impl("weight_norm_many", TORCH_BOX(&wnfused::weight_norm_many));
  library.impl("weight_norm_many_backward", TORCH_BOX(&wnfused::weight_norm_many_backward));
}

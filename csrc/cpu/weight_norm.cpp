// Row norm, forward and backward.
//
//   data   v [outer, rows, inner]: row r is the set of all v[o, r, i]. Rows along dim 0 have outer = 1, so each row
//          is one run of memory; one norm over a whole tensor has rows = outer = 1.
//   pass   forward reads v twice (the second time from cache) and writes w; backward reads v and dw twice and
//          writes dv. Floor: 2 resp. 3 tensors of memory traffic; the arithmetic is free beside it.
//   sums   16 running sums a row, folded in a fixed order: the result depends on neither the thread count nor the
//          instruction set that the compiler picks. float32 for narrow types, float64 for float64.
#include "ops.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/Dispatch_v2.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace wnfused {
namespace {

using torch::headeronly::ScalarType;

constexpr int kLanes = 16;
constexpr int64_t kGrain = 32768;  // elements below which a second thread costs more than it brings

template <typename T>
using wide_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

struct Rows {
  int64_t outer, rows, inner;
};

Rows rows_of(const Tensor& v, int64_t dim) {
  const int64_t count = v.numel();
  if (dim < 0) return {1, 1, count};
  STD_TORCH_CHECK(dim < v.dim(), "weight_norm: dim ", dim, " is out of range for a tensor of ", v.dim(), " dims");
  int64_t outer = 1, inner = 1;
  for (int64_t d = 0; d < dim; ++d) outer *= v.size(d);
  for (int64_t d = dim + 1; d < v.dim(); ++d) inner *= v.size(d);
  return {outer, v.size(dim), inner};
}

template <typename T>
struct Lanes {
  wide_t<T> sum[kLanes] = {};

  // Folds a run of `count` products a[i] * b[i] into the running sums.
  void add(const T* a, const T* b, int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        sum[lane] += static_cast<wide_t<T>>(a[i + lane]) * static_cast<wide_t<T>>(b[i + lane]);
      }
    }
    for (; i < count; ++i) sum[i % kLanes] += static_cast<wide_t<T>>(a[i]) * static_cast<wide_t<T>>(b[i]);
  }

  wide_t<T> total() const {
    wide_t<T> half[kLanes];
    std::copy(sum, sum + kLanes, half);
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int lane = 0; lane < width; ++lane) half[lane] += half[lane + width];
    }
    return half[0];
  }
};

template <typename Body>
void for_each_row(const Rows& shape, const Body& body) {
  const int64_t elements = std::max<int64_t>(shape.outer * shape.inner, 1);
  torch::stable::parallel_for(0, shape.rows, std::max<int64_t>(kGrain / elements, 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

template <typename T>
void forward_rows(const T* v, const T* g, T* w, wide_t<T>* norm, const Rows& shape) {
  for_each_row(shape, [&](int64_t row) {
    Lanes<T> squares;
    for (int64_t o = 0; o < shape.outer; ++o) {
      const T* run = v + (o * shape.rows + row) * shape.inner;
      squares.add(run, run, shape.inner);
    }
    const wide_t<T> n = std::sqrt(squares.total());
    const wide_t<T> scale = static_cast<wide_t<T>>(g[row]) / n;
    norm[row] = n;
    for (int64_t o = 0; o < shape.outer; ++o) {
      const int64_t at = (o * shape.rows + row) * shape.inner;
      for (int64_t i = 0; i < shape.inner; ++i) {
        w[at + i] = n == 0 ? T(0) : static_cast<T>(scale * static_cast<wide_t<T>>(v[at + i]));
      }
    }
  });
}

template <typename T>
void backward_rows(
    const T* dw, const T* v, const T* g, const wide_t<T>* norm, T* dv, T* dg, const Rows& shape) {
  for_each_row(shape, [&](int64_t row) {
    Lanes<T> products;
    for (int64_t o = 0; o < shape.outer; ++o) {
      const int64_t at = (o * shape.rows + row) * shape.inner;
      products.add(dw + at, v + at, shape.inner);
    }
    // A zero row has zero gradients: its inverse norm counts as 0.
    const wide_t<T> inverse = norm[row] == 0 ? 0 : 1 / norm[row];
    const wide_t<T> dgain = inverse == 0 ? 0 : products.total() * inverse;
    const wide_t<T> scale = static_cast<wide_t<T>>(g[row]) * inverse;
    const wide_t<T> along = dgain * inverse;
    dg[row] = static_cast<T>(dgain);
    for (int64_t o = 0; o < shape.outer; ++o) {
      const int64_t at = (o * shape.rows + row) * shape.inner;
      for (int64_t i = 0; i < shape.inner; ++i) {
        const wide_t<T> across = static_cast<wide_t<T>>(dw[at + i]) - along * static_cast<wide_t<T>>(v[at + i]);
        dv[at + i] = inverse == 0 ? T(0) : static_cast<T>(scale * across);
      }
    }
  });
}

}  // namespace

std::tuple<Tensor, Tensor> weight_norm(const Tensor& v, const Tensor& g, int64_t dim) {
  const Rows shape = rows_of(v, dim);
  STD_TORCH_CHECK(g.numel() == shape.rows, "weight_norm: g has ", g.numel(), " entries for ", shape.rows, " rows");
  STD_TORCH_CHECK(g.scalar_type() == v.scalar_type() && g.is_contiguous(), "weight_norm: g must match v");
  Tensor w = torch::stable::empty_like(v);
  const auto norm_type = v.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  Tensor norm = dim < 0 ? torch::stable::new_empty(v, {}, norm_type)
                        : torch::stable::new_empty(v, {shape.rows}, norm_type);
  THO_DISPATCH_V2(v.scalar_type(), "weight_norm", AT_WRAP([&] {
    forward_rows<scalar_t>(v.const_data_ptr<scalar_t>(), g.const_data_ptr<scalar_t>(),
                           w.mutable_data_ptr<scalar_t>(), norm.mutable_data_ptr<wide_t<scalar_t>>(), shape);
  }), AT_EXPAND(AT_FLOATING_TYPES), ScalarType::Half, ScalarType::BFloat16);
  return {w, norm};
}

std::tuple<Tensor, Tensor> weight_norm_backward(
    const Tensor& dw, const Tensor& v, const Tensor& g, const Tensor& norm, int64_t dim) {
  const Rows shape = rows_of(v, dim);
  STD_TORCH_CHECK(dw.numel() == v.numel() && dw.scalar_type() == v.scalar_type(), "weight_norm_backward: dw must match v");
  STD_TORCH_CHECK(g.numel() == shape.rows && g.scalar_type() == v.scalar_type() && g.is_contiguous(),
                  "weight_norm_backward: g must match v");
  STD_TORCH_CHECK(norm.numel() == shape.rows && norm.is_contiguous(), "weight_norm_backward: norm must match v");
  Tensor dv = torch::stable::empty_like(v);
  Tensor dg = torch::stable::empty_like(g);
  THO_DISPATCH_V2(v.scalar_type(), "weight_norm_backward", AT_WRAP([&] {
    backward_rows<scalar_t>(dw.const_data_ptr<scalar_t>(), v.const_data_ptr<scalar_t>(),
                            g.const_data_ptr<scalar_t>(), norm.const_data_ptr<wide_t<scalar_t>>(),
                            dv.mutable_data_ptr<scalar_t>(), dg.mutable_data_ptr<scalar_t>(), shape);
  }), AT_EXPAND(AT_FLOATING_TYPES), ScalarType::Half, ScalarType::BFloat16);
  return {dv, dg};
}

}  // namespace wnfused

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CPU, library) {
  library.impl("weight_norm", TORCH_BOX(&wnfused::weight_norm));
  library.impl("weight_norm_backward", TORCH_BOX(&wnfused::weight_norm_backward));
}

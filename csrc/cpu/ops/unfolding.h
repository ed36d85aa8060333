// Maps as matrices: a row [channels x taps] for each window that a convolution's output pixel meets, zeros beyond the
// map. Wide layers on few pixels, whose time is that of their weights, are linear layers (linear_routes.h) of such
// rows: those kernels read the weights as they lie.
//
//   conv             y rows = act(s (X v^T) + b)     X = the windows of x      (conv_unfolded.cpp)
//   conv_transpose   Z = s x rows v                  y = the sum of Z where windows of y overlap
//                                                                              (conv_transpose_unfolded.cpp)
#pragma once

#include "cpu/conv_layer/conv_layer.h"
#include "cpu/layer/tensor.h"

namespace wnfused::cpu {

// The 1x1 layer whose windows are the pixels of a map.
ConvShape pointwise(const Tensor& map);

// Whether the memory of a map is that of its pixels, one row of channels after the other.
bool is_rows(const Tensor& map);

// From one entry of a row to the next channel's, and to the next tap's.
struct Order {
  int64_t channel, tap;
};

constexpr Order kPixels{1, 1};  // of rows with one tap

// The order of the rows of v, NCHW or channels_last.
inline Order order_of(const Tensor& v, int64_t taps) {
  return v.is_contiguous() ? Order{taps, 1} : Order{1, v.size(1)};
}

inline Tensor matrix_of(const Tensor& memory, int64_t rows, int64_t columns) {
  return matrix(memory, 0, rows, columns, columns, 1);
}

Tensor empty_matrix(int64_t rows, int64_t columns);

// The windows of a map as rows, in place where they are that.
Tensor unfolded(const Tensor& map, const ConvShape& shape, const Order& order);

// A matrix to be filled with rows for the map, which fold() puts there, the sums of them where windows overlap: the
// map's own memory, if it can be that.
Tensor rows_to_fold(const Tensor& map, const ConvShape& shape);
void fold(const Tensor& rows, const ConvShape& shape, const Order& order, const Tensor& map);

// The pixels of a map as rows.
Tensor rows_of(const Tensor& map);

// Whether all entries of a dense tensor in float32 are finite.
bool all_finite(const Tensor& t);
// The same of the norms of the weights' rows, and of what scales them.
bool all_finite(const float* gain, const float* norms, int64_t rows);

}  // namespace wnfused::cpu

// How the entries of v and of maps lie in memory.
#pragma once

#include <algorithm>

#include "cpu/layer/layer.h"
#include "cpu/layer/tensor.h"
#include "layout.h"

namespace wnfused::cpu {

// Without torch's dispatcher where there is nothing to do.
inline Tensor as_contiguous(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

// torch's rule for the format of a result: strides that grow in the order C, W, H, D, N, be the map dense or not. Where
// sizes of 1 leave both orders open it is NCHW.
inline bool suggests_channels_last(const Tensor& t) {
  if (t.dim() < 4 || t.stride(1) == 0) return false;
  int64_t least = 0;
  for (int64_t i = 0, dims = t.dim(); i < dims; ++i) {
    const int64_t d = i == 0 ? 1 : i == dims - 1 ? 0 : dims - i;
    if (t.size(d) == 0 || t.stride(d) < least || (d == 0 && least == t.stride(1))) return false;
    least = t.stride(d) * std::max<int64_t>(t.size(d), 1);
  }
  return true;
}

// A map in channels_last, copied only where it is in another format.
inline Tensor in_channels_last(const Tensor& map) {
  if (suggests_channels_last(map) || map.numel() == 0) return map;
  Tensor copy = empty_map(sizes_of(map), true, map.scalar_type());
  torch::stable::copy_(copy, map);
  return copy;
}

// In two dims, or in three.
inline bool is_channels_last(const Tensor& t) { return !t.is_contiguous() && has_dense_rows(t); }

// A map [N, C, spatial] as passes go over it: lines along C, or along the map.
inline Lines lines_of(const Tensor& z) {
  const int64_t channels = z.size(1), entries = z.numel();
  if (entries == 0) return {true, 0, 0, channels, channels};
  if (is_channels_last(z)) return {true, 0, entries / channels, channels, channels};
  const int64_t planes = z.size(0) * channels;
  return {false, 0, planes, entries / planes, channels};
}

// Neither NCHW nor channels_last: the passes work on an NCHW copy.
inline Tensor in_lines(const Tensor& z) {
  return is_channels_last(z) ? z : as_contiguous(z);
}

// A map over three dims whose lines, numbered through all levels, lie at equal distances; a copy where they do not.
inline Tensor with_even_lines(const Tensor& t) {
  if (t.dim() < 5 || t.size(2) == 1 || t.size(3) == 1 || t.stride(2) == t.size(3) * t.stride(3)) return t;
  Tensor copy = empty_map(sizes_of(t), suggests_channels_last(t), t.scalar_type());
  torch::stable::copy_(copy, t);
  return copy;
}

}  // namespace wnfused::cpu

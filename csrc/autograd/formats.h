// Memory formats of convolutions: of what a layer gives, and of what torch's own convolutions compute in.
#pragma once

#include <ATen/core/Tensor.h>

namespace wnfused::formats {

using at::MemoryFormat;
using at::Tensor;

// The rule of reference.suggest_memory_format: contiguous where t is that, too, of one channel say.
inline MemoryFormat of(const Tensor& t) {
  if (t.is_contiguous()) return MemoryFormat::Contiguous;
  if (t.dim() == 4 && t.is_contiguous(MemoryFormat::ChannelsLast)) return MemoryFormat::ChannelsLast;
  if (t.dim() == 5 && t.is_contiguous(MemoryFormat::ChannelsLast3d)) return MemoryFormat::ChannelsLast3d;
  return MemoryFormat::Contiguous;
}

// Of a layer's output.
inline MemoryFormat of(const Tensor& x, const Tensor& v) {
  const MemoryFormat format = of(x);
  return format == MemoryFormat::Contiguous ? of(v) : format;
}

// What torch's convolutions compute in: by strides alone, which a 1x1 weight may have either way.
inline MemoryFormat of_product(const Tensor& x, const Tensor& v) {
  const MemoryFormat format = x.suggest_memory_format();
  return format == MemoryFormat::Contiguous ? v.suggest_memory_format() : format;
}

}  // namespace wnfused::formats

// What the nodes of single layers, and the ways through them, hand to each other.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <tuple>

namespace wnfused {

using Optional = std::optional<at::Tensor>;

// The tensors of y = act(s op(x, v) + b + z), s = g / ||v||.
struct LayerInputs {
  const at::Tensor &x, &v, &g;
  const Optional &bias, &residual;
};

// By each of these, in this order; none where nobody asked for it.
using Gradients = std::tuple<Optional, Optional, Optional, Optional, Optional>;

}  // namespace wnfused

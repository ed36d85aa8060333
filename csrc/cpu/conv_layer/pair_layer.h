// A single convolution layer on pairs of bfloat16, where the processor has products of them (pair_window.h): groups 1,
// one level, x and its gradient bfloat16, v and its gradient either.
#pragma once

#include "cpu/conv_layer/conv_layer.h"
#include "cpu/pair_window/pair_window.h"

namespace wnfused::cpu {

// What an instruction set provides that multiplies pairs.
struct PairWindowKernels {
  PairTile tile;
  ConvKernels<PairWindow> kernels, transposed;

  const ConvKernels<PairWindow>& of(bool is_transposed) const { return is_transposed ? transposed : kernels; }
};

namespace amx {
extern const PairWindowKernels pair_window_kernels;
}
namespace avx512_bf16 {
extern const PairWindowKernels pair_window_kernels;
}
namespace amx_emulated {
extern const PairWindowKernels pair_window_kernels;
}

// Null where the processor has no such products.
const PairWindowKernels* pair_window_kernels();

// run_conv_layer, kept_floats and run_conv_layer_backward of layers by Method::kPairs.
bool run_pair_layer(const ConvLayer& layer, const std::optional<torch::stable::Tensor>& residual,
                    const torch::stable::Tensor& y, float* norm, const KeptBank* kept);
KeptFloats kept_pair_floats(const ConvLayer& layer);
bool run_pair_layer_backward(const ConvLayer& layer, const torch::stable::Tensor& dy, const torch::stable::Tensor& y,
                             const float* norm, const ConvGradients& gradients);

}  // namespace wnfused::cpu

// The kernels that layer.cpp and small_linear.cpp bind, compiled apart from them: pybind11 takes several times as long
// to compile as they do, and a planted bug compiles its kernels anew.
#pragma once

#include "cuda/layer_epilogue.h"
#include "cuda/layer_mask.h"
#include "cuda/layer_weight.h"
#include "cuda/small_linear.h"

namespace wnfused::gpu::emulated {

// Defined, and instantiated, in layer_kernels.cpp.
template <bool kBackward, class T, class N>
Status layer_weight(const LayerWeightParams<T, N>& params, Queue queue);

template <class N>
Status layer_epilogue(const LayerEpilogueParams<N>& params, Queue queue);

template <class N>
Status layer_mask(const LayerMaskParams<N>& params, Queue queue);

template <class N>
int64_t mask_shares(const LayerMaskParams<N>& params);

// The same in small_linear_kernels.cpp.
template <class Product, class T, class N>
Status small_linear(const SmallLinearParams<T, N>& params, Queue queue);

template <class Product, class T, class N>
Status small_linear_backward(const SmallLinearParams<T, N>& params, Queue queue);

}  // namespace wnfused::gpu::emulated

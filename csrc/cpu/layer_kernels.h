// The table of one instruction set's kernels; included by layer_<isa>.cpp.
#pragma once

#include <type_traits>

#include "layer.h"
#include "layer_epilogue.h"
#include "layer_rows.h"
#include "layer_small.h"
#include "linear_layer_driver.h"
#include "norm_rows.h"

namespace wnfused::cpu::WNFUSED_ISA {

const LayerKernels layer_kernels = {
    norms, scaled, gradient, epilogue, mask, small_linear, small_linear_backward, norm_kernels<float, float>(),
    norm_kernels<uint16_t, float>(), norm_kernels<double, double>()};

#if defined(__x86_64__) && WNFUSED_VECTOR_BITS > 128
const LinearKernels linear_kernels = {
    Singles::kEntries, nullptr, linear_forward<Singles, float>, linear_backward<Singles, float>};
#endif

}  // namespace wnfused::cpu::WNFUSED_ISA

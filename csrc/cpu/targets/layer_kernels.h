// The table of one instruction set's kernels; included by layer_<isa>.cpp.
#pragma once

#include <type_traits>

#include "cpu/layer/layer.h"
#include "cpu/layer/epilogue.h"
#include "cpu/layer/rows.h"
#include "cpu/linear/small.h"
#include "cpu/linear/few_features.h"
#include "cpu/linear/few_inputs.h"
#include "cpu/linear/panel_forward.h"
#include "cpu/linear/panel_backward.h"
#include "cpu/linear/driver.h"
#include "cpu/planes/driver.h"
#include "cpu/strips/driver.h"
#include "cpu/layer/norm_rows.h"

namespace wnfused::cpu::WNFUSED_ISA {

const LayerKernels layer_kernels = {
    norms, scaled, gradient, epilogue, mask, small_linear, small_linear_backward, norm_kernels<float, float>(),
    norm_kernels<uint16_t, float>(), norm_kernels<double, double>()};

const FewKernels few_kernels = {few_features, few_features_backward, few_inputs_backward, few_inputs_gradient};

#if defined(__x86_64__) && WNFUSED_VECTOR_BITS > 128
const PanelKernels panel_kernels = {kPanelRows, kPanels, panel_forward, panel_backward};

const LinearKernels linear_kernels = {
    Singles::kUnit, false, nullptr, linear_forward<Singles, float>, linear_backward<Singles, float>};

const PlanesKernels planes_kernels = {planes_forward, planes_backward};

const StripKernels strip_kernels = {kUnitBlocks * kLanes, strips_forward, strips_backward};
#endif

}  // namespace wnfused::cpu::WNFUSED_ISA

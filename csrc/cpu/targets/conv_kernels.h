// The tables of one instruction set's kernels; included by conv_<isa>.cpp.
#pragma once

#include "cpu/conv_layer/driver.h"
#include "cpu/conv_layer/parts.h"
#include "cpu/depthwise/driver.h"
#include "cpu/stage/backward.h"

namespace wnfused::cpu::WNFUSED_ISA {

const StageKernels stage_kernels = {forward<float>, backward<float>};

const ConvKernels<Geometry> winograd_kernels = {conv_layer_forward<WinogradParts>, conv_layer_backward<WinogradParts>};

const ConvKernels<Pieces> pieces_kernels = {conv_layer_forward<PiecesParts>, conv_layer_backward<PiecesParts>};

const ConvKernels<Window> direct_kernels = {conv_layer_forward<DirectParts>, conv_layer_backward<DirectParts>};

const ConvKernels<Window> transposed_kernels = {conv_layer_forward<TransposedParts>,
                                                conv_layer_backward<TransposedParts>};

const ConvKernels<Depthwise> depthwise_kernels = {depthwise_forward, depthwise_backward};

}  // namespace wnfused::cpu::WNFUSED_ISA

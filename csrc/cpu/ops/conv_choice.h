// Who multiplies a convolution: the rules by which the kernels of conv_layer.h take a layer, or leave it to the vendor's.
// All are measured (bench/NOTES.md). Wide layers on few pixels are asked for before these: unfolding.h.
#pragma once

#include "cpu/conv_layer/conv_layer.h"

namespace wnfused::cpu {

// How these kernels take a layer and its gradients: one of the stage's Winograd methods, kPieces or kDirect. kept: the
// weights are packed for many calls.
std::optional<Method> conv_layer_method(const ConvShape& shape, bool transposed, bool kept = false);

// Whether the vendor's kernels are faster all the same for a layer that has a method, to judge by its maps. last: y is
// channels_last; passes: an activation or a residual follows; input: its gradient is asked for.
bool is_vendors(const ConvLayer& layer, bool last, bool passes);
bool is_vendors_backward(const ConvLayer& layer, bool last, bool input);

// Whether a transposed layer, or the data gradient of another one, makes so large a map of so few pixels that its windows
// meet the padding mostly, which kDirect leaves out and all others multiply.
bool meets_padding(const ConvShape& shape);

// For a layer in bfloat16, which these kernels multiply as float32: whether it has so many products that the vendor's
// instructions for bfloat16 make up for `times` what a call of the vendor's costs; and whether the vendor's kernels are
// then faster than the layer's method.
bool has_many_bfloat16_products(const ConvShape& shape, int64_t times = 1);
bool is_vendors_bfloat16(const ConvLayer& layer);

// Whether a layer in bfloat16 is fastest as products of pairs of this library's (pair_window.h).
bool suits_pairs(const ConvShape& shape, bool transposed, bool backward);

}  // namespace wnfused::cpu

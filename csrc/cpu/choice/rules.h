// What choice.cpp asks of each way: whether there are kernels for a layer, and whether they are the fastest. Every
// layer is_sound(), and of a backward the gradient of x or that of v is asked for.
#pragma once

#include <optional>

#include "cpu/choice/choice.h"

namespace wnfused::cpu {

bool suits_planes(const ConvTraits& layer);
bool suits_planes_backward(const ConvTraits& layer);

// Channels on a side up to which strips are fastest wherever they have kernels: they leave most lanes of others empty.
constexpr int64_t kFewChannels = 6;

bool suits_strips(const ConvTraits& layer, bool passes);
bool suits_strips_backward(const ConvTraits& layer, const Needs& needs);

bool suits_unfolding(const ConvTraits& layer);
bool suits_unfolding_backward(const ConvTraits& layer, const Needs& needs);

// How the kernels of conv_layer/ take a layer, where they are faster than the vendor's.
std::optional<Method> own_method(const ConvTraits& layer, const ForwardAsks& asks);
std::optional<Method> own_method_backward(const ConvTraits& layer, const Needs& needs);

// How they take it in float32, be they faster or not.
std::optional<Method> float_method(const ConvShape& shape, bool transposed, bool kept = false);

// First layers over two dims, of images, in NCHW whose pixels the kernels of conv_layer/ take one after another, with y
// written by transposed panels. The more taps, the more the vendor gains on large maps.
bool is_direct_first_layer(const ConvTraits& layer);

// Floats of y from which a first layer is large: its output is more than a call's cost.
constexpr int64_t kLargeFirstLayer = int64_t{1} << 18;

// 3x3 layers that keep the size of a map, and over three dims 3x3x3 and 1x3x3 ones; of one level in groups,
// too, of whole blocks, or of 4 or 8 channels in and out.
bool takes_winograd(const ConvShape& shape);

// Floats of copies of x, with so wide a border, and of y, in the layout of the kernels; backward there are as many
// again. The most, for all of them: 2 GB.
double copied_floats(const ConvShape& shape, const Triple& border);
constexpr double kMostCopied = 1 << 29;

// Whether a layer in bfloat16 has so many products that the vendor's instructions for bfloat16 make up for `times` what
// a call of the vendor's costs.
bool has_many_bfloat16_products(const ConvTraits& layer, int64_t times = 1);

// Whether reading a kept bank is faster than packing it again, in a network whose banks come from memory: smaller banks
// are packed into a cache, and read there. And whether a layer's planes, or its pixels as rows, are faster than reading
// one.
bool is_worth_keeping(const ConvShape& shape, Method method);
constexpr int64_t kWorthPacking = 64;  // so many pixels are worth packing v for in every call
bool planes_outdo_banks(const ConvTraits& layer);
bool rows_outdo_banks(const ConvTraits& layer);

}  // namespace wnfused::cpu

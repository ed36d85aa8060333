// All that the kernels use and that is not compiled for an instruction set: every translation unit here includes it
// before it opens its target, so that the linker finds one copy of it that every processor can run. A test holds them
// to it.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "cpu/conv_layer/conv_layer.h"
#include "cpu/conv_layer/pair_layer.h"
#include "cpu/linear/few.h"
#include "cpu/linear/linear_layer.h"
#include "cpu/machine/amx_tiles.h"
#include "cpu/orthonormal/orthonormal.h"
#include "cpu/planes/planes.h"
#include "cpu/stage/stage.h"
#include "cpu/strips/strips.h"

// How many blocks of a kernel run together and see each other's shared memory: its `kClusterBlocks`, if it has any.
#pragma once

#include <type_traits>

namespace wnfused::gpu {

template <class Kernel, class = void>
constexpr int kClusterOf = 1;
template <class Kernel>
constexpr int kClusterOf<Kernel, std::void_t<decltype(Kernel::kClusterBlocks)>> = Kernel::kClusterBlocks;

}  // namespace wnfused::gpu

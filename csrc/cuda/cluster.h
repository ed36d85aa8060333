// How many blocks of a kernel run together and see each other's shared memory, its `kClusterBlocks`, if it has any; and
// how many a launch has.
#pragma once

#include <cstdint>
#include <type_traits>

namespace wnfused::gpu {

template <class Kernel, class = void>
constexpr int kClusterOf = 1;
template <class Kernel>
constexpr int kClusterOf<Kernel, std::void_t<decltype(Kernel::kClusterBlocks)>> = Kernel::kClusterBlocks;

// As many more as fill the last cluster.
template <class Kernel>
constexpr int64_t grid_of(int64_t blocks) {
  return (blocks + kClusterOf<Kernel> - 1) / kClusterOf<Kernel> * kClusterOf<Kernel>;
}

// Of a grid's first dim. A launch of more is an error: cut to 32 bits it would leave blocks out.
constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;

}  // namespace wnfused::gpu

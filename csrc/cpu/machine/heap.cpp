// Teaches the C library's allocator, when this library is loaded, what a training step frees.
//
// glibc takes blocks above a threshold from the system by themselves and gives them back at once, and so it does with
// what is free at the end of a heap, above another threshold. Every step then pays for fresh pages, 1 us each: up to a
// third of a ResNet's training step with a batch of 8. Both begin at 128 KB; the first one follows the largest block
// that was freed by then, up to 32 MB, and the other one is twice that from then on, so that they depend on what a
// process happens to have done before. One such block, allocated and freed without being written, leaves the process as
// any is that has freed a tensor of that size. Who sets MALLOC_TRIM_THRESHOLD_ or its like, or calls mallopt, has
// switched this off; other allocators take no notice.
#include <cstdint>
#include <cstdlib>

namespace wnfused::cpu {
namespace {

bool free_a_large_block() {
  constexpr std::size_t kLargestHeeded = std::size_t{32} << 20, kPage = 4096;
  // Volatile, since compilers leave out what is allocated and freed unused.
  void* volatile block = std::malloc(kLargestHeeded - 2 * kPage);
  std::free(block);
  return block != nullptr;
}

[[maybe_unused]] const bool freed = free_a_large_block();

}  // namespace
}  // namespace wnfused::cpu

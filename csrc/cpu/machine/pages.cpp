#include "cpu/machine/pages.h"

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#define WNFUSED_HAS_MMAP 1
#else
#define WNFUSED_HAS_MMAP 0
#endif

#include <cstdlib>
#include <utility>

namespace wnfused::cpu {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kMaps = false;  // so that the sanitizer knows where it ends
#else
constexpr bool kMaps = WNFUSED_HAS_MMAP;
#endif

constexpr int64_t kMapped = int64_t{1} << 20;  // bytes
constexpr size_t kLine = 64;

#if WNFUSED_HAS_MMAP
void* map(size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
#if defined(MADV_HUGEPAGE)
  // Advice only: where it is refused the pages stay small.
  constexpr size_t kHugePage = size_t{1} << 21;
  if (bytes >= 2 * kHugePage) (void)madvise(data, bytes, MADV_HUGEPAGE);
#endif
  return data;
}

void unmap(void* data, size_t bytes) { (void)munmap(data, bytes); }
#else
void* map(size_t) { return nullptr; }
void unmap(void*, size_t) {}
#endif

}  // namespace

std::unique_ptr<Pages> Pages::allocate(int64_t floats) {
  constexpr int64_t kMost = INT64_MAX / static_cast<int64_t>(sizeof(float)) - static_cast<int64_t>(kLine);
  if (floats < 0 || floats > kMost) return nullptr;
  std::unique_ptr<Pages> pages(new Pages);
  pages->floats_ = floats;
  const auto bytes = static_cast<size_t>(pages->bytes());
  void* data = kMaps && pages->bytes() >= kMapped ? map(bytes) : nullptr;
  pages->mapped_ = data != nullptr;
  // Where no more can be mapped there may be room in the heap still.
  if (!data) data = std::aligned_alloc(kLine, (bytes / kLine + 1) * kLine);
  pages->data_ = static_cast<float*>(data);
  return data ? std::move(pages) : nullptr;
}

Pages::~Pages() {
  if (mapped_) unmap(data_, static_cast<size_t>(bytes()));
  else std::free(data_);
}

}  // namespace wnfused::cpu

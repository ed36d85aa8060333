#include "workspace.h"

#include <torch/csrc/stable/ops.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <atomic>
#include <memory>

namespace wnfused::cpu {
namespace {

using torch::stable::Tensor;

// A network of three stages, forward and backward, keeps at most this much: slots x floats.
constexpr int kSlots = 6;
constexpr int64_t kKeptFloats = int64_t{1} << 24;

// Never destroyed: torch may be gone before this library is.
std::atomic<Tensor*> slots[kSlots];

constexpr int64_t kLine = 16;  // floats a cache line

Tensor* take(int64_t floats) {
  for (auto& slot : slots) {
    std::unique_ptr<Tensor> buffer(slot.exchange(nullptr));
    if (!buffer) continue;
    if (buffer->numel() >= floats) return buffer.release();
    Tensor* empty = nullptr;
    if (slot.compare_exchange_strong(empty, buffer.get())) buffer.release();
  }
  auto buffer = std::make_unique<Tensor>(torch::stable::empty({floats}, torch::headeronly::ScalarType::Float));
  prefer_huge_pages(*buffer);
  return buffer.release();
}

// Kept in an empty slot, else in place of a smaller buffer, else freed.
void put_back(std::unique_ptr<Tensor> buffer) {
  if (buffer->numel() > kKeptFloats) return;
  for (auto& slot : slots) {
    Tensor* empty = nullptr;
    if (slot.compare_exchange_strong(empty, buffer.get())) {
      buffer.release();
      return;
    }
  }
  for (auto& slot : slots) {
    std::unique_ptr<Tensor> other(slot.exchange(nullptr));
    if (other && other->numel() > buffer->numel()) std::swap(other, buffer);
    Tensor* empty = nullptr;
    if (slot.compare_exchange_strong(empty, buffer.get())) buffer.release();
    buffer = std::move(other);
    if (!buffer) return;
  }
}

}  // namespace

Workspace::Workspace(int64_t floats) : buffer_(take(floats + kLine)) {
  const auto address = reinterpret_cast<uintptr_t>(buffer_->mutable_data_ptr());
  data_ = reinterpret_cast<float*>((address + 63) / 64 * 64);
}

Workspace::~Workspace() { put_back(std::unique_ptr<Tensor>(buffer_)); }

void prefer_huge_pages(const Tensor& tensor) {
#if defined(__linux__)
  constexpr uintptr_t kHugePage = uintptr_t{1} << 21, kPage = uintptr_t{1} << 12;
  const auto begin = reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr());
  const uintptr_t end = begin + static_cast<uintptr_t>(tensor.numel()) * 2;  // every element has two bytes or more
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage, last = end / kPage * kPage;
  // Advice only: where it is refused the pages stay small.
  if (last >= first + 2 * kHugePage) (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)tensor;
#endif
}

}  // namespace wnfused::cpu

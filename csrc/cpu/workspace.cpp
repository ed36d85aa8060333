#include "workspace.h"

#include <torch/csrc/stable/ops.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

namespace wnfused::cpu {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kLine = 16;  // floats a cache line

int64_t bytes_of(const Tensor& tensor) {
  return tensor.numel() * (tensor.scalar_type() == ScalarType::Float ? 4 : 2);
}

// Asks for huge pages for a large tensor that is about to be written for the first time.
void prefer_huge_pages(const Tensor& tensor) {
#if defined(__linux__)
  constexpr uintptr_t kHugePage = uintptr_t{1} << 21, kPage = uintptr_t{1} << 12;
  const auto begin = reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr());
  const uintptr_t end = begin + static_cast<uintptr_t>(bytes_of(tensor));
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage, last = end / kPage * kPage;
  // Advice only: where it is refused the pages stay small.
  if (last >= first + 2 * kHugePage) (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)tensor;
#endif
}

Tensor empty_floats(int64_t floats) {
  Tensor buffer = torch::stable::empty({floats}, ScalarType::Float);
  prefer_huge_pages(buffer);
  return buffer;
}

// Buffers that nobody uses at the moment. A slot is one atomic pointer: taken out by exchange, put back by
// compare-exchange. Never destroyed: torch may be gone before this library is.
template <int kSlots>
class Shelf {
 public:
  explicit constexpr Shelf(int64_t kept_floats) : kept_floats_(kept_floats) {}

  // The smallest buffer of at least `floats` and at most `most`, else null.
  Tensor* take(int64_t floats, int64_t most) {
    for (int attempt = 0; attempt < kSlots; ++attempt) {
      Slot* best = nullptr;
      int64_t best_size = most;
      for (Slot& slot : slots_) {
        const int64_t size = slot.size.load(std::memory_order_relaxed);
        if (size < floats || size > best_size || !slot.buffer.load(std::memory_order_relaxed)) continue;
        best = &slot;
        best_size = size;
      }
      if (!best) return nullptr;
      // Somebody else may have been here since.
      std::unique_ptr<Tensor> buffer = best->empty(floats_);
      if (buffer && buffer->numel() >= floats && buffer->numel() <= most) return buffer.release();
      if (buffer) put(std::move(buffer));
    }
    return nullptr;
  }

  // Keeps the buffer in an empty slot, else in the place of smaller ones, the smallest first, as long as the sum of all
  // stays in bounds.
  void put(std::unique_ptr<Tensor> buffer) {
    const int64_t size = buffer->numel();
    if (size > kept_floats_) return;
    for (int attempt = 0; attempt <= kSlots; ++attempt) {
      if (floats_.fetch_add(size) + size <= kept_floats_)
        for (Slot& slot : slots_)
          if (slot.fill(buffer)) return;
      floats_.fetch_sub(size);
      if (!drop_smallest(size)) return;
    }
  }

 private:
  struct Slot {
    std::atomic<Tensor*> buffer{nullptr};
    std::atomic<int64_t> size{0};  // of the buffer that was put here last: a hint

    // What was in it; the shelf's sum is that much less.
    std::unique_ptr<Tensor> empty(std::atomic<int64_t>& floats) {
      std::unique_ptr<Tensor> taken(buffer.exchange(nullptr));
      if (taken) floats.fetch_sub(taken->numel());
      return taken;
    }

    // False, and the buffer stays with the caller, where there is one already.
    bool fill(std::unique_ptr<Tensor>& given) {
      const int64_t floats = given->numel();
      Tensor* none = nullptr;
      if (!buffer.compare_exchange_strong(none, given.get())) return false;
      given.release();
      size.store(floats, std::memory_order_relaxed);
      return true;
    }
  };

  // The smallest buffer, unless it has `floats` or more.
  bool drop_smallest(int64_t floats) {
    Slot* smallest = nullptr;
    for (Slot& slot : slots_) {
      const int64_t size = slot.size.load(std::memory_order_relaxed);
      if (size >= floats || !slot.buffer.load(std::memory_order_relaxed)) continue;
      smallest = &slot;
      floats = size;
    }
    return smallest && smallest->empty(floats_) != nullptr;
  }

  int64_t kept_floats_;
  std::atomic<int64_t> floats_{0};
  Slot slots_[kSlots];
};

Shelf<6> workspaces(int64_t{1} << 25);  // 128 MB
Shelf<64> tensors(int64_t{1} << 28);    // 1 GB

constexpr int64_t kLargeTensor = int64_t{1} << 18;  // floats; smaller ones the allocator itself recycles

Tensor* workspace_buffer(int64_t floats) {
  Tensor* kept = workspaces.take(floats, INT64_MAX);
  return kept ? kept : new Tensor(empty_floats(floats));
}

}  // namespace

Workspace::Workspace(int64_t floats) : buffer_(workspace_buffer(floats + kLine)) {
  const auto address = reinterpret_cast<uintptr_t>(buffer_->mutable_data_ptr());
  data_ = reinterpret_cast<float*>((address + 63) / 64 * 64);
}

Workspace::~Workspace() {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(buffer_->mutable_data_ptr(), bytes_of(*buffer_));
#endif
  workspaces.put(std::unique_ptr<Tensor>(buffer_));
}

Tensor recycled_empty(torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType dtype) {
  int64_t elements = 1;
  for (int64_t size : sizes) elements *= size;
  const int64_t size_of = dtype == ScalarType::Float ? 4 : 2;
  const int64_t floats = (elements * size_of + 3) / 4;
  if (floats < kLargeTensor) return torch::stable::empty(sizes, dtype);
  // Twice as large a one may serve: gradients of narrow stages find room in maps of wide ones, which are used up by then.
  std::unique_ptr<Tensor> buffer(tensors.take(floats, 2 * floats));
  if (!buffer) buffer = std::make_unique<Tensor>(empty_floats(floats));
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= sizes[i]) strides[i] = stride;
  void* data = buffer->mutable_data_ptr();
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  Tensor* owner = buffer.get();
  Tensor tensor = torch::stable::from_blob(data, sizes, strides, cpu, dtype, [owner](void*) {
    tensors.put(std::unique_ptr<Tensor>(owner));
  });
  buffer.release();
  return tensor;
}

}  // namespace wnfused::cpu

// Ops:
//   release_cpu_memory() -> ()     gives back what is kept for the next call
//   set_cpu_poison(bool on) -> ()  whether memory reads as NaN until it is written, for tests
#include "cpu/machine/workspace.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/machine/memory_size.h"

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

void release_cpu_memory();

Tensor empty_floats(int64_t floats) {
  const auto empty = [&] { return torch::stable::empty({floats}, ScalarType::Float); };
  Tensor buffer = [&] {
    try {
      return empty();
    } catch (const std::exception&) {
      release_cpu_memory();
      return empty();
    }
  }();
  prefer_huge_pages(buffer);
  return buffer;
}

// Buffers that nobody uses at the moment. A slot is one atomic pointer: taken out by exchange, put back by
// compare-exchange. Never destroyed: torch may be gone before this library is.
template <int kSlots>
class Shelf {
 public:
  // kept_floats: how many it keeps at most, asked when the first buffer comes.
  explicit constexpr Shelf(int64_t (*kept_floats)()) : kept_floats_(kept_floats) {}

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
    const int64_t size = buffer->numel(), kept = kept_floats_();
    if (size > kept) return;
    for (int attempt = 0; attempt <= kSlots; ++attempt) {
      if (floats_.fetch_add(size) + size <= kept)
        for (Slot& slot : slots_)
          if (slot.fill(buffer)) return;
      floats_.fetch_sub(size);
      if (!drop_smallest(size)) return;
    }
  }

  void clear() {
    for (Slot& slot : slots_) slot.empty(floats_);
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

  int64_t (*kept_floats_)();
  std::atomic<int64_t> floats_{0};
  Slot slots_[kSlots];
};

// A step of a deep network takes again what the last one freed, and no more is kept than a step has had: up to a quarter
// of the memory there is, or 1 GB where that is more.
int64_t kept_tensor_floats() {
  constexpr int64_t kLeast = int64_t{1} << 28;
  return std::max(kLeast, memory_size() / 4 / static_cast<int64_t>(sizeof(float)));
}

Shelf<6> workspaces([] { return int64_t{1} << 25; });  // 128 MB
Shelf<256> tensors(kept_tensor_floats);

Tensor* workspace_buffer(int64_t floats) {
  Tensor* kept = workspaces.take(floats, INT64_MAX);
  return kept ? kept : new Tensor(empty_floats(floats));
}

// Memory that lasting tensors share. Like a slot of a shelf, the pointer to the one that is being filled is taken out
// while it is in use.
constexpr int64_t kSlabFloats = int64_t{1} << 23;  // 32 MB; what nobody has written takes no memory

struct Slab {
  std::shared_ptr<Tensor> memory;  // the tensors in it have it, too
  int64_t used;

  bool has_room(int64_t floats) const { return used + floats <= kSlabFloats; }
};

std::atomic<Slab*> filling{nullptr};

std::atomic<bool> poisoning{false};

void set_cpu_poison(bool on) { poisoning.store(on); }

void release_cpu_memory() {
  workspaces.clear();
  tensors.clear();
}

float* aligned(const Tensor& buffer) {
  const auto address = reinterpret_cast<uintptr_t>(buffer.mutable_data_ptr());
  return reinterpret_cast<float*>((address + 63) / 64 * 64);
}

int64_t entries_from_first_to_last(Sizes sizes, Sizes strides) {
  int64_t last = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return 0;
    last += (sizes[d] - 1) * strides[d];
  }
  return last + 1;
}

template <class Release>
Tensor tensor_in(void* data, Sizes sizes, Sizes strides, ScalarType dtype, Release release) {
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  return torch::stable::from_blob(data, sizes, strides, cpu, dtype, release);
}

}  // namespace

std::vector<int64_t> contiguous_strides(Sizes sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);
  return strides;
}

void poison_for_tests(void* data, int64_t bytes) {
  if (poisoning.load(std::memory_order_relaxed) && bytes > 0) std::memset(data, 0xFF, static_cast<size_t>(bytes));
}

Workspace::Workspace(int64_t floats) : buffer_(workspace_buffer(floats + kLine)) {
  data_ = aligned(*buffer_);
  poison_for_tests(buffer_->mutable_data_ptr(), bytes_of(*buffer_));
}

Workspace::~Workspace() {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(buffer_->mutable_data_ptr(), bytes_of(*buffer_));
#endif
  workspaces.put(std::unique_ptr<Tensor>(buffer_));
}

Tensor empty_strided(Sizes sizes, Sizes strides, ScalarType dtype) {
  const int32_t type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), type,
                                                  aoti_torch_device_type_cpu(), 0, &made));
  Tensor tensor(made);
  poison_for_tests(tensor.mutable_data_ptr(), tensor.numel() * tensor.element_size());
  return tensor;
}

Tensor recycled_empty(Sizes sizes, Sizes strides, ScalarType dtype, int64_t least) {
  const int64_t bytes = entries_from_first_to_last(sizes, strides) * (dtype == ScalarType::Float ? 4 : 2);
  const int64_t floats = (bytes + 3) / 4;
  const bool recycles = dtype == ScalarType::Float || dtype == ScalarType::BFloat16;
  if (!recycles || floats < least) return empty_strided(sizes, strides, dtype);
  // A buffer of up to twice the size will do: gradients of narrow stages fit into maps of wide ones, used up by then.
  std::unique_ptr<Tensor> buffer(tensors.take(floats, 2 * floats));
  if (!buffer) buffer = std::make_unique<Tensor>(empty_floats(floats));
  Tensor* owner = buffer.get();
  poison_for_tests(buffer->mutable_data_ptr(), bytes);
  Tensor tensor = tensor_in(buffer->mutable_data_ptr(), sizes, strides, dtype,
                            [owner](void*) { tensors.put(std::unique_ptr<Tensor>(owner)); });
  buffer.release();
  return tensor;
}

Tensor recycled_empty(Sizes sizes, ScalarType dtype) {
  return recycled_empty(sizes, contiguous_strides(sizes), dtype);
}

Tensor lasting_floats(int64_t floats) {
  const int64_t room = (floats / kLine + 2) * kLine;  // a line between any two
  if (room > kSlabFloats / 2) return empty_floats(floats);
  std::unique_ptr<Slab> slab(filling.exchange(nullptr));
  if (slab && slab->memory.use_count() == 1) {
    // Whatever its last owner did with it must be visible here.
    std::atomic_thread_fence(std::memory_order_acquire);
    slab->used = 0;
  }
  if (!slab || !slab->has_room(room))
    slab = std::make_unique<Slab>(Slab{std::make_shared<Tensor>(empty_floats(kSlabFloats + kLine)), 0});
  float* data = aligned(*slab->memory) + slab->used;
  poison_for_tests(data, floats * static_cast<int64_t>(sizeof(float)));
  Tensor tensor = tensor_in(data, {floats}, {1}, ScalarType::Float, [memory = slab->memory](void*) {});
  slab->used += room;
  Slab* none = nullptr;
  if (filling.compare_exchange_strong(none, slab.get())) slab.release();
  return tensor;
}

}  // namespace wnfused::cpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CompositeExplicitAutograd, m) {
  m.impl("release_cpu_memory", TORCH_BOX(&wnfused::cpu::release_cpu_memory));
  m.impl("set_cpu_poison", TORCH_BOX(&wnfused::cpu::set_cpu_poison));
}

// Ops:
//   release_cpu_memory() -> ()     gives back what is kept for the next call
//   set_cpu_poison(bool on) -> ()  whether memory reads as NaN until it is written, for tests
#include "cpu/machine/workspace.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "cpu/machine/memory_size.h"
#include "cpu/machine/shelf.h"
#include "cpu/vec/lanes.h"

namespace wnfused::cpu {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kLine = 16;  // floats a cache line

// A step of a deep network takes again what the last one freed: up to a quarter of the memory there is, or 1 GB where
// that is more and no more than a half.
int64_t kept_tensor_floats() {
  constexpr int64_t kLeast = int64_t{1} << 30;
  const int64_t memory = memory_size();
  return std::max(memory / 4, std::min(kLeast, memory / 2)) / static_cast<int64_t>(sizeof(float));
}

Shelf<6> workspaces([] { return int64_t{1} << 25; });  // 128 MB
Shelf<256> tensors(kept_tensor_floats);

// Memory that lasting tensors share. Like a slot of a shelf, the pointer to the one that is being filled is taken out
// while it is in use.
constexpr int64_t kSlabFloats = int64_t{1} << 23;  // 32 MB; what nobody has written takes no memory

struct Slab {
  std::shared_ptr<Pages> memory;  // the tensors in it have it, too
  int64_t used;

  bool has_room(int64_t floats) const { return used + floats <= kSlabFloats; }
};

std::atomic<Slab*> filling{nullptr};

void release_cpu_memory() {
  workspaces.clear();
  tensors.clear();
  const std::unique_ptr<Slab> slab(filling.exchange(nullptr));
}

// What make() returns, asked a second time where there is no memory while some is kept.
template <class Make>
auto with_memory(const Make& make) {
  try {
    return make();
  } catch (const std::exception&) {
    release_cpu_memory();
    return make();
  }
}

std::unique_ptr<Pages> fresh_pages(int64_t floats) {
  return with_memory([&] {
    if (std::unique_ptr<Pages> pages = Pages::allocate(floats)) return pages;
    (void)torch::stable::empty({floats}, ScalarType::Float);  // fails, too, in torch's own words
    throw std::bad_alloc();
  });
}

std::atomic<bool> poisoning{false};

void set_cpu_poison(bool on) { poisoning.store(on); }

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

Workspace::Workspace(int64_t floats) : pages_(workspaces.take(floats, INT64_MAX)) {
  if (!pages_) pages_ = fresh_pages(floats);
  poison_for_tests(data(), pages_->bytes());
}

Workspace::~Workspace() {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(pages_->data(), pages_->bytes());
#endif
  workspaces.put(std::move(pages_));
}

Tensor empty_strided(Sizes sizes, Sizes strides, ScalarType dtype) {
  const int32_t type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  Tensor tensor = with_memory([&] {
    AtenTensorHandle made = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                    type, aoti_torch_device_type_cpu(), 0, &made));
    return Tensor(made);
  });
  poison_for_tests(tensor.mutable_data_ptr(), tensor.numel() * tensor.element_size());
  return tensor;
}

Tensor recycled_empty(Sizes sizes, Sizes strides, ScalarType dtype, Recycled recycled) {
  if (dtype != ScalarType::Float && dtype != ScalarType::BFloat16) return empty_strided(sizes, strides, dtype);
  const int64_t bytes = entries_from_first_to_last(sizes, strides) * (dtype == ScalarType::Float ? 4 : 2);
  const int64_t floats = divide_up(bytes, static_cast<int64_t>(sizeof(float)));
  if (floats < recycled.least) return empty_strided(sizes, strides, dtype);
  std::unique_ptr<Pages> pages = tensors.take(floats, floats + floats / recycled.spare);
  if (!pages) pages = fresh_pages(floats);
  poison_for_tests(pages->data(), bytes);
  float* data = pages->data();
  const auto keep = [](Pages* used) { tensors.put(std::unique_ptr<Pages>(used)); };
  return tensor_in(data, sizes, strides, dtype, [memory = std::shared_ptr<Pages>(pages.release(), keep)](void*) {});
}

Tensor recycled_empty(Sizes sizes, ScalarType dtype) {
  return recycled_empty(sizes, contiguous_strides(sizes), dtype);
}

Tensor lasting_floats(int64_t floats) {
  const int64_t room = (floats / kLine + 2) * kLine;  // a line between any two
  if (room > kSlabFloats / 2) {
    std::shared_ptr<Pages> own = fresh_pages(floats);
    float* data = own->data();
    poison_for_tests(data, own->bytes());
    return tensor_in(data, {floats}, {1}, ScalarType::Float, [own = std::move(own)](void*) {});
  }
  std::unique_ptr<Slab> slab(filling.exchange(nullptr));
  if (slab && slab->memory.use_count() == 1) {
    // Whatever its last owner did with it must be visible here.
    std::atomic_thread_fence(std::memory_order_acquire);
    slab->used = 0;
  }
  if (!slab || !slab->has_room(room))
    slab = std::make_unique<Slab>(Slab{fresh_pages(kSlabFloats), 0});
  float* data = slab->memory->data() + slab->used;
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

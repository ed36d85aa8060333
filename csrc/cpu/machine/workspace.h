// Memory of a call: scratch, and tensors. Fresh pages cost more than the arithmetic of a small stage, so what a call
// has done with is kept for the next one (shelf.h). Running out of memory raises torch's own error, before anything is
// changed.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/machine/pages.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace wnfused::cpu {

class Workspace {
 public:
  explicit Workspace(int64_t floats);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  float* data() const { return pages_->data(); }

 private:
  std::unique_ptr<Pages> pages_;
};

using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

std::vector<int64_t> contiguous_strides(Sizes sizes);

// An uninitialised CPU tensor from torch's allocator, without a trip through the dispatcher.
torch::stable::Tensor empty_strided(Sizes sizes, Sizes strides, torch::headeronly::ScalarType dtype);

// Which tensors take their memory again: of `least` floats and more, with up to a `spare`-th of that besides.
struct Recycled {
  int64_t least, spare;
};

// The same for what a training step frees and allocates again and again: float32 and bfloat16 tensors keep their memory
// for the next call, in all at most a quarter of what there is, or 1 GB. Their storage cannot be resized. Gradients and
// scratch, from 1 MB on: those of narrow stages fit into the maps of wide ones, used up by then.
constexpr Recycled kRecycledGradients{int64_t{1} << 18, 1};
torch::stable::Tensor recycled_empty(Sizes sizes, Sizes strides, torch::headeronly::ScalarType dtype,
                                     Recycled recycled = kRecycledGradients);
torch::stable::Tensor recycled_empty(Sizes sizes, torch::headeronly::ScalarType dtype);

// Floats for what is written once and then read by many calls, from memory with huge pages: on small ones a bank of
// many planes, each read 4 KB at a time, spends up to a seventh of a call on addresses.
torch::stable::Tensor lasting_floats(int64_t floats);

// Fills memory that is about to be handed out with NaN (bytes of ones, in every floating dtype) where tests ask for it
// by set_cpu_poison: an entry that nobody writes then shows.
void poison_for_tests(void* data, int64_t bytes);

// Floats between the regions of two workers. A processor that reads a region to its end fetches on, and the worker
// whose lines those are then waits for each of them in turn, as it writes them: with cores of two dies up to a third of
// the time of a small map's convolution.
constexpr int64_t kApart = 2048;

// Hands out aligned pieces of a buffer; over a null buffer it only measures. Under AddressSanitizer a line that must
// not be touched follows every piece: to the allocator the whole buffer is one object.
class Arena {
 public:
  explicit Arena(float* base) : base_(base) {}

  float* take(int64_t floats) {
    float* piece = base_ ? base_ + used_ : nullptr;
    used_ += (floats + kAlignment - 1) / kAlignment * kAlignment;
#if defined(__SANITIZE_ADDRESS__)
    if (base_) ASAN_POISON_MEMORY_REGION(base_ + used_, kAlignment * sizeof(float));
    used_ += kAlignment;
#endif
    return piece;
  }

  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kAlignment = 16;  // floats: one cache line
  float* base_;
  int64_t used_ = 0;
};

}  // namespace wnfused::cpu

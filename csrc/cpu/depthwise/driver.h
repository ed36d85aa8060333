// The phases of a depthwise layer (depthwise.h).
#pragma once

#include "cpu/depthwise/items.h"
#include "cpu/depthwise/pack.h"

namespace wnfused::cpu::WNFUSED_ISA {

// A worker's own bank, of which it packs a block when it first needs it. `packed`: a number a block, not 0 once it is.
class BlockBank {
 public:
  BlockBank(const Depthwise& layer, const Scratch& scratch, int64_t worker)
      : bank_{scratch.own_bank + worker * scratch.own_bank_stride, nullptr}, layer_(layer) {
    bank_.bias = bank_.weights + layer.bank_size();
    packed_ = bank_.bias + layer.padded_outputs;
    __builtin_memset(packed_, 0, layer.output_blocks * sizeof(float));
  }

  // pack(block, bank) packs one block. Zeros beyond the ends of a row times a weight that is not finite would be NaN.
  template <class Pack>
  void pack(const Span& blocks, std::atomic<bool>* poisoned, const Pack& pack) {
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
      if (packed_[block] != 0.0f) continue;
      pack(block, bank_);
      packed_[block] = 1.0f;
      Block poison = zero();
      for (int64_t k = 0; k < layer_.planes; ++k)
        poison = multiply_add(load(bank_.weights + k * layer_.plane_stride + block * kLanes), zero(), poison);
      if (sum_of(poison) != 0.0f) poisoned->store(true, std::memory_order_relaxed);
    }
  }

  const Bank& bank() const { return bank_; }

 private:
  Bank bank_;
  const Depthwise& layer_;
  float* packed_;
};

// The blocks of item `item`'s bundle.
WNFUSED_INLINE Span blocks_of(const Depthwise& layer, int64_t item) {
  const int64_t first = item % layer.bundles * layer.blocks_at_once;
  return {first, smaller(first + layer.blocks_at_once, layer.output_blocks)};
}

inline void depthwise_forward(const ConvForward<Depthwise>& job, Worker& worker) {
  const Depthwise& layer = job.geometry;
  const DepthwiseRoom room = forward_room(layer);
  float* scratch = job.scratch.worker + worker.index() * job.scratch.worker_stride;
  BlockBank bank(layer, job.scratch, worker.index());
  // A worker that packs alone meets every row once.
  float* packed_norm = worker.is_alone() ? job.norm : nullptr;
  const int64_t items = layer.conv_items();
  worker.phase({items, count_of(job.norm && !packed_norm, layer.output_blocks)}, [&](int64_t item) {
    if (item >= items)
      return measure_rows(job.v, job.output.channels, layer.planes, item - items, job.norm);
    const Span blocks = blocks_of(layer, item);
    bank.pack(blocks, job.poisoned,
              [&](int64_t block, const Bank& target) { pack_rows(job, block, target, packed_norm); });
    depthwise_forward_item(job, room, item / layer.bundles, blocks, bank.bank(), scratch);
  });
}

inline void depthwise_backward(const ConvBackward<Depthwise>& job, Worker& worker) {
  const Depthwise &forward = job.geometry, &back = job.back;
  const DepthwiseRoom room = backward_room(forward, back);
  float* sums = job.scratch.worker + worker.index() * job.scratch.worker_stride;
  float* scratch = sums + forward.blocks_at_once * sum_floats(forward);
  BlockBank bank(back, job.scratch, worker.index());
  const int64_t slices = forward.wgrad_slices, tiles = forward.tile_count();
  worker.phase({slices * forward.bundles}, [&](int64_t item) {
    const int64_t slice = item / forward.bundles;
    const Span blocks = blocks_of(forward, item);
    if (job.dx.given.data)
      bank.pack(blocks, job.poisoned, [&](int64_t block, const Bank& target) { pack_rows(job, block, target); });
    clear_pixels(sums, blocks.count() * (forward.planes + 1));
    for (int64_t tile = tiles * slice / slices; tile < tiles * (slice + 1) / slices; ++tile)
      depthwise_backward_item(job, room, tile, blocks, bank.bank(), sums, scratch);
    if (!job.weight) return;
    float* weight = job.scratch.gradient[0] + slice * forward.gradient_size();
    float* bias = job.scratch.bias_gradient[0] + slice * forward.padded_outputs;
    for (int64_t b = 0; b < blocks.count(); ++b) {
      const float* sum = sums + b * sum_floats(forward);
      const int64_t lane = (blocks.begin + b) * kLanes;
      for (int64_t k = 0; k < forward.planes; ++k)
        store(weight + k * forward.plane_stride + lane, load(sum + k * kLanes));
      store(bias + lane, load(sum + forward.planes * kLanes));
    }
  });
  worker.phase({count_of(job.weight, forward.output_blocks)}, [&](int64_t block) { finish_block(job, block); });
}

}  // namespace wnfused::cpu::WNFUSED_ISA

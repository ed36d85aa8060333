// Where the convolutions of a phase find their weights.
//
//   shared  the phase before packed the bank, for all workers, while the other convolution's was in use
//   own     each worker packs the bank, or the bundle of output blocks that it works on, for itself, when it first
//           needs it: always into the same memory, which no other core has ever touched
//
// Memory that one core writes and another one reads, in turns, makes packing five times as slow, since each line must
// be called back first, and what reads it twice as slow. So a bank is shared only where five or more workers divide the
// packing (choose_banks).
#pragma once

#include "cpu/conv/memory.h"
#include "cpu/vec/prefetch.h"

namespace wnfused::cpu::WNFUSED_ISA {

template <class G>  // Geometry, Pieces, Window or PairWindow
class Banks {
 public:
  Banks(const G& geometry, const Scratch& scratch, int64_t worker)
      : geometry_(geometry), shared_(scratch.bank) {
    if (!geometry.own_banks) return;
    memory_ = scratch.own_bank + worker * scratch.own_bank_stride;
    own_ = {memory_, memory_ + geometry.bank_size()};
  }

  // What item `item` of convolution `convolution` multiplies by. pack(block, bank) packs one block of it, if need be.
  template <class Pack>
  const Bank& of(int64_t convolution, int64_t item, const Pack& pack) {
    if (!geometry_.own_banks) return shared_[convolution % 2];
    const bool divided = geometry_.divides_banks();
    const int64_t bundle = divided ? geometry_.conv_item(item).bundle : 0;
    if (convolution != convolution_ || bundle != bundle_) {
      const int64_t blocks = divided ? geometry_.conv_bundle_blocks : geometry_.output_blocks;
      const int64_t begin = bundle * blocks, end = smaller(begin + blocks, geometry_.output_blocks);
      // A bundle's blocks are addressed as if all those before them were there, too.
      if (geometry_.narrow_banks) own_.weights = memory_ - begin * geometry_.block_floats();
      for (int64_t block = begin; block < end; ++block) pack(block, own_);
      convolution_ = convolution;
      bundle_ = bundle;
    }
    return own_;
  }

  // The backward of a convolution multiplies by a bank of its own.
  void forget() { convolution_ = -1; }

 private:
  const G& geometry_;
  const Bank* shared_;
  float* memory_ = nullptr;
  Bank own_{};
  int64_t convolution_ = -1, bundle_ = 0;
};

}  // namespace wnfused::cpu::WNFUSED_ISA

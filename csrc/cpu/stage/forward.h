// The stage's forward, block by block: which items run in which phase.
//
//   load x | conv a_0 from h_0 | conv h_1 from a_0 | ... | store y
//
// '|' are the phase boundaries, two to a block. Workers pack a convolution's weights for themselves when they come to
// it; where they share a bank, it is packed in the phase before, while the other convolution's is in use, so that two
// banks suffice (banks.h). Within a phase every worker takes the long items of its share first (work_queue.h).
#pragma once

#include "cpu/conv/banks.h"
#include "cpu/conv3x3/conv.h"
#include "cpu/conv3x3/pack.h"
#include "cpu/stage/maps.h"

namespace wnfused::cpu::WNFUSED_ISA {

// The maps of one block of the forward.
template <class Operand>
struct BlockMaps {
  StreamMap<Operand> stream;  // h_b
  Operand* hidden;            // a_b
  StreamMap<Operand> next;    // h_{b+1}; may be `stream`
  SavedMap saved_hidden, saved_next;
};

// The convolutions of a forward, each with what is to be prepared in its phase: the next one's bank, if that is shared,
// otherwise its own norms.
template <class Operand>
class Forward {
 public:
  // `norm` may be null.
  Forward(const StageForward& job, Worker& worker, Banks<Geometry>& banks, float* scratch, float* norm)
      : job_(job), geometry_(job.geometry), worker_(worker), banks_(banks), scratch_(scratch), norm_(norm) {}

  // Items to be prepared before convolution `first`.
  int64_t first_items() const { return geometry_.own_banks ? 0 : geometry_.channel_blocks; }

  void prepare_first(int64_t first, int64_t item) const { pack(first, item, job_.scratch.bank[first % 2], norm_); }

  // First convolution of block b; after it, unless it is the last one, comes the second.
  void hidden(int64_t b, const BlockMaps<Operand>& maps, bool last) {
    ConvEpilogue<Operand> epilogue{};
    epilogue.operand = maps.hidden;
    epilogue.round = job_.round_operands;
    epilogue.saved = maps.saved_hidden;
    phase<Ending::kRelu>(2 * b, maps.stream.operand, job_.round_operands, true, epilogue, last);
  }

  // Second convolution of block b and the residual sum; after it, unless it is the last one, comes the next block.
  void stream(int64_t b, const BlockMaps<Operand>& maps, bool last) {
    ConvEpilogue<Operand> epilogue{};
    epilogue.operand = maps.next.operand;
    epilogue.out = maps.next.sum;
    epilogue.other = maps.stream.sum;
    epilogue.factor = job_.skip_scale;
    epilogue.saved = maps.saved_next;
    phase<Ending::kResidual>(2 * b + 1, maps.hidden, false, b + 1 < geometry_.blocks, epilogue, last);
  }

 private:
  template <Ending kEnding>
  void phase(int64_t convolution, const Operand* map, bool round_map, bool saved, ConvEpilogue<Operand>& epilogue,
             bool last) {
    const bool own = geometry_.own_banks;
    float* packed_norm = own && !packs_once() ? nullptr : norm_;
    const int64_t prepared = count_of(own ? norm_ != packed_norm : !last, geometry_.channel_blocks);
    const bool fresh = saved && job_.saved.in_place;
    LeftPanels left;
    worker_.phase({geometry_.conv_items(), prepared}, [&](int64_t item) {
      if (item < geometry_.conv_items()) {
        fetch_input(geometry_, worker_, item, map);
        const Bank& bank = banks_.of(convolution, item,
                                     [&](int64_t block, const Bank& target) {
                                       pack(convolution, block, target, packed_norm);
                                     });
        // Kernels copy the epilogue in whole vectors, which would wait for a store into it to leave the core.
        if (epilogue.bias != bank.bias) epilogue.bias = bank.bias;
        fetch_output(geometry_, worker_, item, fresh, epilogue);
        convolution_item<kEnding>(geometry_, item, map, round_map, job_.scratch.zeros, bank.weights, epilogue,
                                  {upcoming_weights(job_.v, geometry_, convolution, 1, item), {}}, scratch_,
                                  *job_.poisoned, finds_panel(geometry_, item, left));
      } else if (own) {
        measure_norms(job_.v, geometry_.outputs, geometry_.channels * kTaps, convolution, item - geometry_.conv_items(),
                      norm_);
      } else {
        pack(convolution + 1, item - geometry_.conv_items(), job_.scratch.bank[(convolution + 1) % 2], norm_);
      }
    });
  }

  // Whether a row is packed by one worker and once: it is measured then, too. Nothing is packed for an empty batch.
  bool packs_once() const {
    if (worker_.is_alone()) return geometry_.conv_chunks > 0;
    return geometry_.weights_stay && geometry_.conv_chunks == 1;
  }

  void pack(int64_t convolution, int64_t block, const Bank& bank, float* norm) const {
    pack_forward<1>(job_, convolution, block, bank, norm, scratch_ + job_.scratch.packing);
  }

  const StageForward& job_;
  const Geometry& geometry_;
  Worker& worker_;
  Banks<Geometry>& banks_;
  float* scratch_;
  float* norm_;
};

template <class Operand>
inline void forward(const StageForward& job, Worker& worker) {
  const Geometry& geometry = job.geometry;
  const SavedMaps& saved = job.saved;
  const int64_t blocks = geometry.blocks;
  float* scratch = job.scratch.worker + worker.index() * job.scratch.worker_stride;
  Banks banks(geometry, job.scratch, worker.index());
  Forward<Operand> convolutions(job, worker, banks, scratch, job.norm);
  const SavedMap none{nullptr, false};
  // Saved maps that are operands are written in place, others as copies.
  const bool in_place = saved.in_place;

  const auto stream = [&](int64_t b) {
    StreamMap<Operand> map = scratch_stream<Operand>(job.scratch);
    if (in_place && b < blocks) map.operand = saved_in_place<Operand>(saved, geometry, 2 * b);
    if (!is_pair<Operand>()) map.sum = reinterpret_cast<float*>(map.operand);
    return map;
  };
  const auto hidden = [&](int64_t b) {
    return in_place ? saved_in_place<Operand>(saved, geometry, 2 * b + 1) : as_operand<Operand>(job.scratch.hidden);
  };
  const auto saved_stream = [&](int64_t b) {
    if (!saved.data || in_place || b >= blocks) return none;
    if (saved.every == 0) return saved_map(saved, geometry, 2 * b);
    return b % saved.every == 0 ? saved_map(saved, geometry, b / saved.every) : none;
  };
  const auto saved_hidden = [&](int64_t b) {
    return saved.data && !in_place && saved.every == 0 ? saved_map(saved, geometry, 2 * b + 1) : none;
  };

  const int64_t first = count_of(blocks > 0, convolutions.first_items());
  const int64_t borders = count_of(geometry.bordered, geometry.images);
  worker.phase({first, borders, geometry.runs()}, [&](int64_t item) {
    if (item < first) return convolutions.prepare_first(0, item);
    if ((item -= first) < borders) {
      if constexpr (is_pair<Operand>())
        for (Operand* map : {stream(0).operand, hidden(0)}) clear_borders(geometry, map, item);
      return;
    }
    item -= borders;
    read_map(geometry, job.x, item, stream(0).sum);
    round_stream(geometry, stream(0), item);
    const SavedMap copy = saved_stream(0);
    if (copy.data) write_saved(geometry, stream(0).sum, item, copy);
  });
  for (int64_t b = 0; b < blocks; ++b) {
    const BlockMaps<Operand> maps{stream(b), hidden(b), stream(b + 1), saved_hidden(b), saved_stream(b + 1)};
    convolutions.hidden(b, maps, false);
    convolutions.stream(b, maps, b + 1 == blocks);
  }
  worker.phase({geometry.runs()}, [&](int64_t item) { write_map(geometry, stream(blocks).sum, item, job.y); });
}

}  // namespace wnfused::cpu::WNFUSED_ISA

// The stage's backward, block by block: which items run in which phase (see forward.h).
//
//   load dy
//   | dW_1 from (a, dh), conv da from dh, finish dW_0 of block b+1
//   | dW_0 from (h, da), conv dh from da, finish dW_1 of block b        | ... | store dx
//
// With recomputation the backward walks segments of `every` blocks: it loads the segment's first h, runs the forward
// into the scratch maps of the segment, then goes back through it.
#pragma once

#include "cpu/conv3x3/finish_gradient.h"
#include "cpu/conv3x3/wgrad.h"
#include "cpu/stage/forward.h"

namespace wnfused::cpu::WNFUSED_ISA {

// Where the backward finds h_b and a_b.
template <class Operand>
struct BackwardMaps {
  const Operand* stream;
  const Operand* hidden;
  const Operand* next_hidden;  // of the block before
};

// One worker's walk through the backward of a stage.
template <class Operand>
class Backward {
 public:
  Backward(const StageBackward& job, Worker& worker)
      : job_(job),
        geometry_(job.geometry),
        worker_(worker),
        scratch_(job.scratch.worker + worker.index() * job.scratch.worker_stride),
        gradient_(scratch_stream<Operand>(job.scratch)),
        hidden_gradient_(as_operand<Operand>(job.scratch.hidden)),
        banks_(geometry_, job.scratch, worker.index()) {}

  void run() {
    const int64_t segment = job_.saved.every;
    worker_.phase({geometry_.runs()}, [&](int64_t item) {
      read_map(geometry_, job_.dy, item, gradient_.sum);
      round_stream(geometry_, gradient_, item);
    });
    if (segment == 0) {
      if (geometry_.blocks > 0) saved_blocks();
    } else {
      for (int64_t end = geometry_.blocks; end > 0; end = (end - 1) / segment * segment)
        recomputed_segment((end - 1) / segment * segment, end);
    }
    finish_phase();
    worker_.phase({geometry_.runs()}, [&](int64_t item) { write_map(geometry_, gradient_.sum, item, job_.dx); });
  }

 private:
  // Everything was saved. Maps that cannot be read in place (then operands are float) are converted one phase ahead.
  void saved_blocks() {
    const SavedMaps& saved = job_.saved;
    const int64_t last = geometry_.blocks - 1;
    const bool convert = !saved.in_place;
    const int64_t items = count_of(convert, geometry_.runs());
    worker_.phase({items, shared_items()}, [&](int64_t item) {
      if (item < items)
        read_saved(geometry_, saved_map(saved, geometry_, 2 * last + 1), item, job_.scratch.saved_hidden);
      else pack_shared(2 * last + 1, item - items);
    });
    for (int64_t b = last; b >= 0; --b) {
      const BackwardMaps<Operand> maps{
          convert ? as_operand<Operand>(job_.scratch.saved_stream) : saved_in_place<Operand>(saved, geometry_, 2 * b),
          convert ? as_operand<Operand>(job_.scratch.saved_hidden)
                  : saved_in_place<Operand>(saved, geometry_, 2 * b + 1),
          convert || b == 0 ? nullptr : saved_in_place<Operand>(saved, geometry_, 2 * b - 1)};
      hidden_phase(b, maps, items, [&](int64_t item) {
        read_saved(geometry_, saved_map(saved, geometry_, 2 * b), item, job_.scratch.saved_stream);
      });
      stream_phase(b, maps, b > 0, count_of(b > 0, items), [&](int64_t item) {
        read_saved(geometry_, saved_map(saved, geometry_, 2 * b - 1), item, job_.scratch.saved_hidden);
      });
    }
  }

  // Blocks [begin, end): the forward again from the saved h_begin, then the backward.
  void recomputed_segment(int64_t begin, int64_t end) {
    const StageForward forward = as_forward();
    const auto stream = [&](int64_t b) {
      float* map = job_.scratch.saved_stream + (b - begin) * geometry_.operand_size();
      return StreamMap<Operand>{is_pair<Operand>() ? job_.scratch.recomputed : map, as_operand<Operand>(map)};
    };
    const auto hidden = [&](int64_t b) {
      return as_operand<Operand>(job_.scratch.saved_hidden + (b - begin) * geometry_.operand_size());
    };
    const SavedMap none{nullptr, false};
    const SavedMap start = saved_map(job_.saved, geometry_, begin / job_.saved.every);
    Forward<Operand> convolutions(forward, worker_, banks_, scratch_, nullptr);
    const int64_t first = convolutions.first_items();
    finish_phase();
    worker_.phase({first, geometry_.runs()}, [&](int64_t item) {
      if (item < first) return convolutions.prepare_first(2 * begin, item);
      read_saved(geometry_, start, item - first, stream(begin).sum);
      round_stream(geometry_, stream(begin), item - first);
    });
    for (int64_t b = begin; b < end; ++b) {
      const bool last = b + 1 == end;
      const BlockMaps<Operand> maps{stream(b), hidden(b), last ? stream(b) : stream(b + 1), none, none};
      convolutions.hidden(b, maps, last);
      if (!last) convolutions.stream(b, maps, false);
    }
    banks_.forget();
    worker_.phase({shared_items()}, [&](int64_t item) { pack_shared(2 * end - 1, item); });
    for (int64_t b = end - 1; b >= begin; --b) {
      const BackwardMaps<Operand> maps{stream(b).operand, hidden(b), b > begin ? hidden(b - 1) : nullptr};
      hidden_phase(b, maps, 0, [](int64_t) {});
      stream_phase(b, maps, b > begin, 0, [](int64_t) {});
    }
  }

  // From dh of block b + 1 to da, and the second convolution's weight gradient.
  template <class Read>
  void hidden_phase(int64_t b, const BackwardMaps<Operand>& maps, int64_t read_items, const Read& read) {
    ConvEpilogue<Operand> epilogue{};
    epilogue.operand = hidden_gradient_;
    epilogue.mask = maps.hidden;
    epilogue.round = job_.round_operands;
    const int64_t gradients = count_of(job_.parameters, geometry_.wgrad_items()), finish = pending_items();
    const int64_t packs = shared_items();
    left_.forget();
    worker_.phase({gradients, geometry_.conv_items(), read_items, packs, finish}, [&](int64_t item) {
      if (item < gradients) return weight_gradient(1, item, maps.hidden, gradient_.operand);
      if ((item -= gradients) < geometry_.conv_items())
        return convolution<Ending::kMask>(2 * b + 1, item, gradient_.operand, job_.round_operands, maps.stream,
                                          epilogue);
      if ((item -= geometry_.conv_items()) < read_items) return read(item);
      if ((item -= read_items) < packs) return pack_shared(2 * b, item);
      finish_pending(item - packs);
    });
    pending_ = 2 * b + 1;
  }

  // From da to dh of block b, and the first convolution's weight gradient.
  template <class Read>
  void stream_phase(int64_t b, const BackwardMaps<Operand>& maps, bool pack_next, int64_t read_items,
                    const Read& read) {
    ConvEpilogue<Operand> epilogue{};
    epilogue.operand = gradient_.operand;
    epilogue.out = gradient_.sum;
    epilogue.other = gradient_.sum;
    epilogue.factor = job_.skip_scale;
    const int64_t gradients = count_of(job_.parameters, geometry_.wgrad_items()), finish = pending_items();
    const int64_t packs = count_of(pack_next, shared_items());
    left_.forget();
    worker_.phase({gradients, geometry_.conv_items(), read_items, packs, finish}, [&](int64_t item) {
      if (item < gradients) return weight_gradient(0, item, maps.stream, hidden_gradient_);
      if ((item -= gradients) < geometry_.conv_items())
        return convolution<Ending::kAdd>(2 * b, item, hidden_gradient_, false, maps.next_hidden, epilogue);
      if ((item -= geometry_.conv_items()) < read_items) return read(item);
      if ((item -= read_items) < packs) return pack_shared(2 * b - 1, item);
      finish_pending(item - packs);
    });
    pending_ = 2 * b;
  }

  // which: 1 for the second convolution, from a (an operand as it is) and dh; 0 for the first, from h (the saved
  // operand, or the stream itself where it was recomputed) and da (an operand as it is).
  void weight_gradient(int which, int64_t item, const Operand* x, const Operand* dy) {
    float* bank = job_.scratch.gradient[which];
    float* bias_gradient = job_.scratch.bias_gradient[which];
    if constexpr (is_pair<Operand>()) {
      weight_gradient_item(geometry_, item, x, dy, bank, bias_gradient, scratch_);
    } else {
      const bool round_x = job_.round_operands && which == 0 && job_.saved.every > 0;
      const bool round_gradient = job_.round_operands && which == 1;
      const auto run = round_x          ? weight_gradient_item<true, false>
                       : round_gradient ? weight_gradient_item<false, true>
                                        : weight_gradient_item<false, false>;
      run(geometry_, item, x, dy, job_.scratch.zeros, bank, bias_gradient, left_, scratch_);
    }
  }

  // What dh is scaled by before the second convolution's output gradient; the first convolution's is da itself.
  float factor(int64_t convolution) const { return convolution % 2 ? job_.skip_scale : 1.0f; }

  int64_t shared_items() const { return count_of(!geometry_.own_banks, geometry_.channel_blocks); }

  void pack_shared(int64_t convolution, int64_t item) { pack(convolution, item, job_.scratch.bank[convolution % 2]); }

  void pack(int64_t convolution, int64_t block, const Bank& bank) {
    if (job_.scratch.packing == 0) left_.forget();  // rows of v are staged where panels lie
    pack_backward<1>(job_, geometry_, convolution, block, factor(convolution), bank, scratch_ + job_.scratch.packing);
  }

  // An item of the data gradient of `convolution`.
  template <Ending kEnding>
  void convolution(int64_t convolution, int64_t item, const Operand* map, bool round_map, const Operand* next,
                   ConvEpilogue<Operand>& epilogue) {
    fetch_input(geometry_, worker_, item, map);
    const Bank& bank = banks_.of(convolution, item,
                                 [&](int64_t block, const Bank& target) { pack(convolution, block, target); });
    fetch_output(geometry_, worker_, item, false, epilogue);
    convolution_item<kEnding>(geometry_, item, map, round_map, job_.scratch.zeros, bank.weights, epilogue,
                              {upcoming_weights(job_.v, geometry_, convolution, -1, item), upcoming_map(next, item)},
                              scratch_, *job_.poisoned, finds_panel(geometry_, item, left_));
  }

  // What item `item` of a convolution fetches of the map that the next phase's weight gradient reads: it was saved long
  // ago, and half of it perhaps by another worker. Nothing where it would crowd out what is in use.
  Upcoming upcoming_map(const Operand* map, int64_t item) const {
    constexpr int64_t kMost = int64_t{1} << 18;  // a quarter of the second-level cache, or less
    const int64_t items = geometry_.conv_items(), workers = worker_.count();
    const bool divided = geometry_.wgrad_slices >= workers;
    const int64_t bytes = map && job_.parameters ? geometry_.operand_size() * int64_t{sizeof(float)} : 0;
    if (bytes > kMost * (divided ? workers : 1)) return {};
    const Upcoming all{reinterpret_cast<const char*>(map), bytes};
    if (divided) return all.part(item, items);
    const int64_t parts = divide_up(items, workers);
    return all.part(item % parts, parts);
  }

  // The convolution whose weight gradient the last phase summed is finished in the next one.
  int64_t pending_items() const { return count_of(pending_ >= 0 && job_.parameters, geometry_.channel_blocks); }

  void finish_pending(int64_t item) {
    const int which = pending_ % 2;
    left_.forget();
    finish_gradient<1>(job_, pending_, item, factor(pending_),
                       job_.scratch.gradient[which] + geometry_.gradient_offset(item),
                       job_.scratch.bias_gradient[which], scratch_);
  }

  void finish_phase() {
    worker_.phase({pending_items()}, [&](int64_t item) { finish_pending(item); });
    pending_ = -1;
  }

  StageForward as_forward() const {
    StageForward forward{};
    forward.geometry = geometry_;
    forward.v = job_.v;
    forward.g = job_.g;
    forward.bias = job_.bias;
    forward.skip_scale = job_.skip_scale;
    forward.round_operands = job_.round_operands;
    forward.scratch = job_.scratch;
    forward.poisoned = job_.poisoned;
    return forward;
  }

  const StageBackward& job_;
  const Geometry& geometry_;
  Worker& worker_;
  float* scratch_;
  StreamMap<Operand> gradient_;  // dh
  Operand* hidden_gradient_;     // da
  Banks<Geometry> banks_;
  int64_t pending_ = -1;
  LeftPanels left_;
};

template <class Operand>
inline void backward(const StageBackward& job, Worker& worker) {
  Backward<Operand>(job, worker).run();
}

}  // namespace wnfused::cpu::WNFUSED_ISA

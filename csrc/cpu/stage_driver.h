// The stage, block by block: which items run in which phase.
//
//   forward    load x, pack v[0,0] | conv a_0 from h_0, pack v[0,1] | conv h_1 from a_0, pack v[1,0] | ... | store y
//   backward   load dy, pack v[B-1,1]
//              | dW_1 from (a, dh), conv da from dh, pack v[b,0],   finish dW_0 of block b+1
//              | dW_0 from (h, da), conv dh from da, pack v[b-1,1], finish dW_1 of block b        | ... | store dx
//
// '|' are the phase boundaries, two to a block. A bank is packed while the other convolution's bank is in use, so two
// banks and two gradients suffice and stay in the cache. Within a phase the long items are handed out first.
//
// With recomputation the backward walks segments of `every` blocks: it loads the segment's first h, runs the forward
// into the scratch maps of the segment, then goes back through it.
#pragma once

#include "stage_maps.h"
#include "stage_wgrad.h"

namespace wnfused::cpu::WNFUSED_ISA {

WNFUSED_INLINE SavedMap saved_map(const SavedMaps& saved, const Geometry& geometry, int64_t index) {
  const int64_t bytes = geometry.pixels() * geometry.channels * (saved.bfloat16 ? 2 : 4);
  return {static_cast<char*>(saved.data) + index * bytes, saved.bfloat16};
}

WNFUSED_INLINE float* saved_in_place(const SavedMaps& saved, const Geometry& geometry, int64_t index) {
  return static_cast<float*>(saved.data) + index * geometry.map_size();
}

// v of one convolution, if there is such a one.
WNFUSED_INLINE Upcoming upcoming_weights(const Parameter& v, const Geometry& geometry, int64_t convolution) {
  if (convolution < 0 || convolution >= 2 * geometry.blocks) return {static_cast<const char*>(v.data), 0};
  const int64_t bytes = geometry.channels * geometry.channels * kTaps * (v.bfloat16 ? 2 : 4);
  return {static_cast<const char*>(v.data) + convolution * bytes, bytes};
}

WNFUSED_INLINE int64_t count_of(bool wanted, int64_t items) { return wanted ? items : 0; }

// The maps of one block of the forward.
struct BlockMaps {
  float* stream;  // h_b
  float* hidden;  // a_b
  float* next;    // h_{b+1}; may be `stream`
  SavedMap saved_hidden, saved_next;
};

// First convolution of a block, together with the packing of the second one's bank.
inline void forward_hidden(const StageForward& job, const BlockMaps& maps, Worker& worker, float* scratch,
                           int64_t pack_items, const Bank& pack_bank, int64_t pack_convolution, float* norm) {
  const Geometry& geometry = job.geometry;
  const Bank& bank = job.scratch.bank[0];
  const Epilogue epilogue{maps.hidden, nullptr, bank.scale, bank.bias, 1.0f, job.round_operands, maps.saved_hidden};
  worker.phase(geometry.conv_items() + pack_items, [&](int64_t item) {
    if (item < geometry.conv_items())
      convolution_item<Ending::kRelu>(geometry, item, maps.stream, job.round_operands, job.scratch.zeros, bank.weights,
                                      epilogue, upcoming_weights(job.v, geometry, pack_convolution + 1), scratch,
                                      *job.poisoned);
    else
      pack_forward(job, pack_convolution, item - geometry.conv_items(), pack_bank, norm, scratch);
  });
}

// Second convolution of a block and the residual sum, together with the packing of the next block's first bank.
inline void forward_stream(const StageForward& job, const BlockMaps& maps, Worker& worker, float* scratch,
                           int64_t pack_items, int64_t pack_convolution, float* norm) {
  const Geometry& geometry = job.geometry;
  const Bank& bank = job.scratch.bank[1];
  const Epilogue epilogue{maps.next, maps.stream, bank.scale, bank.bias, job.skip_scale, false, maps.saved_next};
  worker.phase(geometry.conv_items() + pack_items, [&](int64_t item) {
    if (item < geometry.conv_items())
      convolution_item<Ending::kResidual>(geometry, item, maps.hidden, false, job.scratch.zeros, bank.weights,
                                          epilogue, upcoming_weights(job.v, geometry, pack_convolution + 1), scratch,
                                          *job.poisoned);
    else
      pack_forward(job, pack_convolution, item - geometry.conv_items(), job.scratch.bank[0], norm, scratch);
  });
}

inline void forward(const StageForward& job, Worker& worker) {
  const Geometry& geometry = job.geometry;
  const SavedMaps& saved = job.saved;
  const int64_t blocks = geometry.blocks, banks = geometry.channel_blocks;
  float* scratch = job.scratch.worker + worker.index() * job.scratch.worker_stride;
  const SavedMap none{nullptr, false};

  // Where h_b is kept, and where a copy of it is saved.
  const auto stream = [&](int64_t b) {
    return saved.in_place && b < blocks ? saved_in_place(saved, geometry, 2 * b) : job.scratch.stream;
  };
  const auto hidden = [&](int64_t b) {
    return saved.in_place ? saved_in_place(saved, geometry, 2 * b + 1) : job.scratch.hidden;
  };
  const auto saved_stream = [&](int64_t b) {
    if (!saved.data || saved.in_place || b >= blocks) return none;
    if (saved.every == 0) return saved_map(saved, geometry, 2 * b);
    return b % saved.every == 0 ? saved_map(saved, geometry, b / saved.every) : none;
  };
  const auto saved_hidden = [&](int64_t b) {
    return saved.data && !saved.in_place && saved.every == 0 ? saved_map(saved, geometry, 2 * b + 1) : none;
  };

  const int64_t first_pack = count_of(blocks > 0, banks);
  worker.phase(first_pack + map_items(geometry), [&](int64_t item) {
    if (item < first_pack) {
      pack_forward(job, 0, item, job.scratch.bank[0], job.norm, scratch);
      return;
    }
    item -= first_pack;
    read_map(geometry, job.x, item, stream(0));
    const SavedMap copy = saved_stream(0);
    if (copy.data) write_saved(geometry, stream(0), item, copy);
  });
  for (int64_t b = 0; b < blocks; ++b) {
    const BlockMaps maps{stream(b), hidden(b), stream(b + 1), saved_hidden(b), saved_stream(b + 1)};
    forward_hidden(job, maps, worker, scratch, banks, job.scratch.bank[1], 2 * b + 1, job.norm);
    forward_stream(job, maps, worker, scratch, count_of(b + 1 < blocks, banks), 2 * b + 2, job.norm);
  }
  worker.phase(map_items(geometry), [&](int64_t item) { write_map(geometry, stream(blocks), item, job.y); });
}

// Where the backward finds h_b and a_b.
struct BackwardMaps {
  const float* stream;
  const float* hidden;
};

// One worker's walk through the backward of a stage.
class Backward {
 public:
  Backward(const StageBackward& job, Worker& worker)
      : job_(job),
        geometry_(job.geometry),
        worker_(worker),
        scratch_(job.scratch.worker + worker.index() * job.scratch.worker_stride),
        banks_(geometry_.channel_blocks) {}

  void run() {
    const int64_t segment = job_.saved.every;
    worker_.phase(map_items(geometry_), [&](int64_t item) { read_map(geometry_, job_.dy, item, job_.scratch.stream); });
    if (segment == 0) {
      if (geometry_.blocks > 0) saved_blocks();
    } else {
      for (int64_t end = geometry_.blocks; end > 0; end = (end - 1) / segment * segment)
        recomputed_segment((end - 1) / segment * segment, end);
    }
    finish_phase();
    worker_.phase(map_items(geometry_),
                  [&](int64_t item) { write_map(geometry_, job_.scratch.stream, item, job_.dx); });
  }

 private:
  // Everything was saved. Maps that cannot be read in place are converted one phase ahead.
  void saved_blocks() {
    const SavedMaps& saved = job_.saved;
    const int64_t last = geometry_.blocks - 1;
    const bool convert = !saved.in_place;
    const int64_t items = count_of(convert, map_items(geometry_));
    worker_.phase(items + banks_, [&](int64_t item) {
      if (item < items) read_saved(geometry_, saved_map(saved, geometry_, 2 * last + 1), item, job_.scratch.saved_hidden);
      else pack(2 * last + 1, item - items);
    });
    for (int64_t b = last; b >= 0; --b) {
      const BackwardMaps maps{convert ? job_.scratch.saved_stream : saved_in_place(saved, geometry_, 2 * b),
                              convert ? job_.scratch.saved_hidden : saved_in_place(saved, geometry_, 2 * b + 1)};
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
    const auto stream = [&](int64_t b) { return job_.scratch.saved_stream + (b - begin) * geometry_.map_size(); };
    const auto hidden = [&](int64_t b) { return job_.scratch.saved_hidden + (b - begin) * geometry_.map_size(); };
    const SavedMap none{nullptr, false};
    const SavedMap start = saved_map(job_.saved, geometry_, begin / job_.saved.every);
    finish_phase();
    worker_.phase(banks_ + map_items(geometry_), [&](int64_t item) {
      if (item < banks_) pack_forward(forward, 2 * begin, item, job_.scratch.bank[0], nullptr, scratch_);
      else read_saved(geometry_, start, item - banks_, stream(begin));
    });
    for (int64_t b = begin; b < end; ++b) {
      const bool last = b + 1 == end;
      const BlockMaps maps{stream(b), hidden(b), last ? nullptr : stream(b + 1), none, none};
      forward_hidden(forward, maps, worker_, scratch_, count_of(!last, banks_), job_.scratch.bank[1], 2 * b + 1,
                     nullptr);
      if (!last) forward_stream(forward, maps, worker_, scratch_, banks_, 2 * b + 2, nullptr);
    }
    worker_.phase(banks_, [&](int64_t item) { pack(2 * end - 1, item); });
    for (int64_t b = end - 1; b >= begin; --b) {
      const BackwardMaps maps{stream(b), hidden(b)};
      hidden_phase(b, maps, 0, [](int64_t) {});
      stream_phase(b, maps, b > begin, 0, [](int64_t) {});
    }
  }

  // From dh of block b + 1 to da, and the second convolution's weight gradient.
  template <class Read>
  void hidden_phase(int64_t b, const BackwardMaps& maps, int64_t read_items, const Read& read) {
    const Epilogue epilogue{job_.scratch.hidden, maps.hidden, nullptr, nullptr, 1.0f, job_.round_operands,
                            {nullptr, false}};
    const int64_t gradients = count_of(job_.parameters, geometry_.wgrad_items()), finish = pending_items();
    worker_.phase(gradients + geometry_.conv_items() + read_items + banks_ + finish, [&](int64_t item) {
      if (item < gradients) return weight_gradient(1, item, maps.hidden, job_.scratch.stream);
      if ((item -= gradients) < geometry_.conv_items())
        return convolution_item<Ending::kMask>(geometry_, item, job_.scratch.stream, job_.round_operands,
                                               job_.scratch.zeros, job_.scratch.bank[1].weights, epilogue,
                                               upcoming_weights(job_.v, geometry_, 2 * b - 1), scratch_,
                                               *job_.poisoned);
      if ((item -= geometry_.conv_items()) < read_items) return read(item);
      if ((item -= read_items) < banks_) return pack(2 * b, item);
      finish_pending(item - banks_);
    });
    pending_ = 2 * b + 1;
  }

  // From da to dh of block b, and the first convolution's weight gradient.
  template <class Read>
  void stream_phase(int64_t b, const BackwardMaps& maps, bool pack_next, int64_t read_items, const Read& read) {
    const Epilogue epilogue{job_.scratch.stream, job_.scratch.stream, nullptr, nullptr, job_.skip_scale, false,
                            {nullptr, false}};
    const int64_t gradients = count_of(job_.parameters, geometry_.wgrad_items()), finish = pending_items();
    const int64_t packs = count_of(pack_next, banks_);
    worker_.phase(gradients + geometry_.conv_items() + read_items + packs + finish, [&](int64_t item) {
      if (item < gradients) return weight_gradient(0, item, maps.stream, job_.scratch.hidden);
      if ((item -= gradients) < geometry_.conv_items())
        return convolution_item<Ending::kAdd>(geometry_, item, job_.scratch.hidden, false, job_.scratch.zeros,
                                              job_.scratch.bank[0].weights, epilogue,
                                              upcoming_weights(job_.v, geometry_, 2 * b - 2), scratch_,
                                              *job_.poisoned);
      if ((item -= geometry_.conv_items()) < read_items) return read(item);
      if ((item -= read_items) < packs) return pack(2 * b - 1, item);
      finish_pending(item - packs);
    });
    pending_ = 2 * b;
  }

  // which: 1 for the second convolution, from a (an operand as it is) and dh; 0 for the first, from h (the saved
  // operand, or the stream itself where it was recomputed) and da (an operand as it is).
  void weight_gradient(int which, int64_t item, const float* x, const float* dy) {
    const bool round_x = job_.round_operands && which == 0 && job_.saved.every > 0;
    const bool round_gradient = job_.round_operands && which == 1;
    const auto run = round_x ? weight_gradient_item<true, false>
                             : round_gradient ? weight_gradient_item<false, true> : weight_gradient_item<false, false>;
    run(geometry_, item, x, dy, job_.scratch.zeros, job_.scratch.gradient[which], job_.scratch.bias_gradient[which],
        scratch_);
  }

  // What dh is scaled by before the second convolution's output gradient; the first convolution's is da itself.
  float factor(int64_t convolution) const { return convolution % 2 ? job_.skip_scale : 1.0f; }

  void pack(int64_t convolution, int64_t item) {
    pack_backward(job_, convolution, item, factor(convolution), job_.scratch.bank[convolution % 2], scratch_);
  }

  // The convolution whose weight gradient the last phase summed is finished in the next one.
  int64_t pending_items() const { return count_of(pending_ >= 0 && job_.parameters, banks_); }

  void finish_pending(int64_t item) {
    const int which = pending_ % 2;
    finish_gradient(job_, pending_, item, factor(pending_), job_.scratch.gradient[which],
                    job_.scratch.bias_gradient[which], scratch_);
  }

  void finish_phase() {
    worker_.phase(pending_items(), [&](int64_t item) { finish_pending(item); });
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
  int64_t banks_;
  int64_t pending_ = -1;
};

inline void backward(const StageBackward& job, Worker& worker) { Backward(job, worker).run(); }

}  // namespace wnfused::cpu::WNFUSED_ISA

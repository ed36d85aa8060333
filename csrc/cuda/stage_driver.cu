#include "cuda/stage_driver.h"

#include <algorithm>

namespace wnfused::gpu {
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Hands out pieces of a workspace, or measures one: then the pieces are null.
class Arena {
 public:
  explicit Arena(char* base) : base_(base) {}
  char* take(int64_t bytes) {
    char* piece = base_ ? base_ + used_ : nullptr;
    used_ += divide_up(bytes, 256) * 256;
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

int64_t map_values(const StageEntry& entry, int64_t images) {
  return images * entry.channels * entry.height * entry.width;
}

// The two operands of every block of `blocks`.
int64_t operand_bytes(const StageEntry& entry, int64_t images, int64_t blocks) {
  return 2 * blocks * map_values(entry, images) * entry.value_bytes;
}

Values from_row(const Values& values, int64_t row, int64_t row_size) {
  return {static_cast<char*>(values.data) + row * row_size * (values.bfloat16 ? 2 : 4), values.bfloat16};
}

// A checkpoint or the stream between segments: [images, H, W, C] in fp32.
ExternalMap stream_map(const StageEntry& entry, const float* data) {
  const int64_t c = entry.channels, row = entry.width * c;
  return {{const_cast<float*>(data), false}, entry.height * row, 1, row, c};
}

// Into how many slices the batch is cut for the weight gradient of `convs` convolutions. What a number of them costs,
// in bytes of memory traffic: the chip reads as many items at once as it has blocks of threads, until the last block is
// done, which takes about an item longer than its items; partial sums are written and read once.
int gradient_slices(const StageEntry& entry, const StageBackwardCall& call, int64_t convs) {
  constexpr int64_t kMost = 16;
  const int64_t items = divide_up(call.problem.images, entry.gradient_images) * entry.gradient_items;
  const int64_t at_once = call.gradient_multiprocessors * entry.gradient_resident;
  const int64_t item_bytes = 2 * map_values(entry, entry.gradient_images) * entry.value_bytes / entry.gradient_items;
  const int64_t slice_bytes = 2 * convs * entry.channels * (9 * entry.channels + 1) * 4;
  int64_t best = 1, least = 0;
  for (int64_t slices = 1; slices <= std::min(items, kMost); ++slices) {
    const int64_t waves = divide_up(convs * slices, at_once);
    const int64_t cost = waves * (divide_up(items, slices) + 1) * at_once * item_bytes +
                         (slices > 1 ? slices * slice_bytes : 0);
    if (slices == 1 || cost < least) {
      best = slices;
      least = cost;
    }
  }
  return static_cast<int>(best);
}

struct ForwardSpace {
  char* weights = nullptr;
  float* bias = nullptr;

  ForwardSpace() = default;
  ForwardSpace(Arena& arena, const StageEntry& entry, const StageProblem& problem) {
    weights = arena.take(entry.packed_bytes(2 * problem.blocks));
    bias = reinterpret_cast<float*>(arena.take(2 * problem.blocks * entry.channels * 4));
  }
};

struct BackwardSpace {
  int64_t segment, segments;  // blocks of one, and how many
  int slices;                 // of the batch, in the weight gradient
  char *weights, *gradients = nullptr, *operands = nullptr;
  uint8_t* signs = nullptr;
  float *stream[2] = {}, *partial = nullptr;
  ForwardSpace forward;

  BackwardSpace(Arena& arena, const StageEntry& entry, const StageBackwardCall& call) {
    const StageProblem& problem = call.problem;
    const int64_t block_bytes = std::max<int64_t>(operand_bytes(entry, problem.images, 1), 1);
    segment = std::max<int64_t>(problem.blocks, 1);
    if (problem.recompute > 0)
      segment = std::min(segment, problem.recompute);
    else if (call.parameters)
      segment = std::clamp<int64_t>(call.segment_bytes / block_bytes, 1, segment);
    segments = std::max<int64_t>(divide_up(problem.blocks, segment), 1);
    if (problem.recompute == 0) {  // segments alike, so that the last one fills the chip as well as the others
      segment = std::max<int64_t>(divide_up(problem.blocks, segments), 1);
      segments = std::max<int64_t>(divide_up(problem.blocks, segment), 1);
    }

    slices = gradient_slices(entry, call, 2 * segment);

    weights = arena.take(entry.packed_bytes(2 * problem.blocks));
    // What a launch reads it may not write: its loads take any way through the caches.
    for (int64_t i = 0; i < std::min<int64_t>(segments - 1, 2); ++i)
      stream[i] = reinterpret_cast<float*>(arena.take(map_values(entry, problem.images) * 4));
    if (problem.recompute > 0) {
      forward = ForwardSpace(arena, entry, problem);
      operands = arena.take(segment * block_bytes);
      signs = reinterpret_cast<uint8_t*>(arena.take(segment * sign_bytes(entry, problem.images, 1)));
    }
    if (!call.parameters) return;
    gradients = arena.take(segment * block_bytes);
    const int64_t row = 9 * entry.channels + 1;
    if (slices > 1) partial = reinterpret_cast<float*>(arena.take(slices * 2 * segment * entry.channels * row * 4));
  }
};

class Backward {
 public:
  Backward(const StageEntry& entry, const StageBackwardCall& call, char* workspace, Queue queue)
      : entry_(entry), call_(call), problem_(call.problem), arena_(workspace), space_(arena_, entry, call),
        queue_(queue) {}

  Status run() {
    const int64_t rows = 2 * problem_.blocks * entry_.channels;
    const bool recompute = problem_.recompute > 0 && problem_.blocks > 0;  // of no blocks there is no checkpoint
    Status status = entry_.pack({problem_.v, problem_.g, problem_.bias, nullptr,
                                 recompute ? space_.forward.weights : nullptr, space_.weights,
                                 recompute ? space_.forward.bias : nullptr, 2 * problem_.blocks},
                                divide_up(rows, entry_.pack_rows), queue_);
    for (int64_t segment = space_.segments - 1; segment >= 0 && status == Status{}; --segment) {
      first_ = segment * space_.segment;
      blocks_ = std::min(space_.segment, problem_.blocks - first_);
      if (recompute) status = recompute_operands(segment);
      if (status == Status{}) status = propagate(segment);
      if (status == Status{} && call_.parameters) status = parameter_gradients();
    }
    return status;
  }

 private:
  int64_t stage_blocks() const { return divide_up(problem_.images, entry_.images); }

  // Every convolution's operand in this segment.
  char* operands() const {
    if (problem_.recompute > 0) return space_.operands;
    return static_cast<char*>(const_cast<void*>(call_.maps)) + operand_bytes(entry_, problem_.images, first_);
  }

  // And its activations' signs.
  uint8_t* signs() const {
    if (problem_.recompute > 0) return space_.signs;
    return const_cast<uint8_t*>(call_.signs) + sign_bytes(entry_, problem_.images, first_);
  }

  Status recompute_operands(int64_t segment) const {
    StageParams params{};
    params.weights = space_.forward.weights + entry_.packed_bytes(2 * first_);
    params.bias = space_.forward.bias + 2 * first_ * entry_.channels;
    params.input = stream_map(
        entry_, static_cast<const float*>(call_.maps) + segment * map_values(entry_, problem_.images));
    params.operands = space_.operands;
    params.signs = space_.signs;
    params.blocks = static_cast<int>(blocks_);
    params.images = static_cast<int>(problem_.images);
    params.skip_scale = problem_.skip_scale;
    return entry_.forward(params, stage_blocks(), queue_);
  }

  Status propagate(int64_t segment) const {
    StageParams params{};
    // Packed last convolution first.
    params.weights = space_.weights + entry_.packed_bytes(2 * (problem_.blocks - first_ - blocks_));
    params.input = segment == space_.segments - 1 ? call_.dy : stream_map(entry_, space_.stream[segment % 2]);
    params.output = segment == 0 ? call_.dx : stream_map(entry_, space_.stream[(segment + 1) % 2]);
    params.operands = space_.gradients;
    params.signs = signs();
    params.blocks = static_cast<int>(blocks_);
    params.images = static_cast<int>(problem_.images);
    params.skip_scale = problem_.skip_scale;
    return entry_.backward(params, stage_blocks(), queue_);
  }

  Status parameter_gradients() const {
    const int64_t row = 2 * first_ * entry_.channels, row_size = 9 * entry_.channels, convs = 2 * blocks_;
    const GradientParams params{operands(),
                                space_.gradients,
                                from_row(problem_.v, row, row_size),
                                from_row(problem_.g, row, 1),
                                call_.norm + row,
                                from_row(call_.dv, row, row_size),
                                from_row(call_.dg, row, 1),
                                from_row(call_.dbias, row, 1),
                                space_.partial,
                                static_cast<int>(convs),
                                static_cast<int>(problem_.images),
                                space_.slices};
    const Status status = entry_.gradient(params, convs * space_.slices, queue_);
    if (status != Status{} || space_.slices == 1) return status;
    return entry_.gradient_sum(params, divide_up(convs * entry_.channels, entry_.sum_rows), queue_);
  }

  const StageEntry& entry_;
  const StageBackwardCall& call_;
  const StageProblem& problem_;
  Arena arena_;
  BackwardSpace space_;
  Queue queue_;
  int64_t first_ = 0, blocks_ = 0;
};

}  // namespace

int64_t sign_bytes(const StageEntry& entry, int64_t images, int64_t blocks) {
  return blocks * images * image_sign_bytes(entry.channels, entry.height * entry.width);
}

int64_t workspace_bytes(const StageEntry& entry, const StageForwardCall& call) {
  Arena arena(nullptr);
  ForwardSpace(arena, entry, call.problem);
  return arena.used();
}

int64_t workspace_bytes(const StageEntry& entry, const StageBackwardCall& call) {
  Arena arena(nullptr);
  BackwardSpace(arena, entry, call);
  return arena.used();
}

Status enqueue(const StageEntry& entry, const StageForwardCall& call, char* workspace, Queue queue) {
  const StageProblem& problem = call.problem;
  Arena arena(workspace);
  const ForwardSpace space(arena, entry, problem);
  const int64_t rows = 2 * problem.blocks * entry.channels;
  const Status status = entry.pack({problem.v, problem.g, problem.bias, call.norm, space.weights, nullptr, space.bias,
                                    2 * problem.blocks},
                                   divide_up(rows, entry.pack_rows), queue);
  if (status != Status{}) return status;
  StageParams params{};
  params.weights = space.weights;
  params.bias = space.bias;
  params.input = call.x;
  params.output = call.y;
  params.operands = problem.recompute == 0 ? static_cast<char*>(call.maps) : nullptr;
  params.signs = problem.recompute == 0 ? call.signs : nullptr;
  params.checkpoints = problem.recompute > 0 ? static_cast<float*>(call.maps) : nullptr;
  params.checkpoint_every = static_cast<int>(problem.recompute);
  params.blocks = static_cast<int>(problem.blocks);
  params.images = static_cast<int>(problem.images);
  params.skip_scale = problem.skip_scale;
  return entry.forward(params, divide_up(problem.images, entry.images), queue);
}

Status enqueue(const StageEntry& entry, const StageBackwardCall& call, char* workspace, Queue queue) {
  return Backward(entry, call, workspace, queue).run();
}

const StageEntry* find_entry(const StageEntry* table, int64_t channels, int64_t height, int64_t width,
                             int64_t shared_limit) {
  for (const StageEntry* entry = table; entry->name; ++entry)
    if (entry->channels == channels && entry->height == height && entry->width == width &&
        entry->shared_bytes <= shared_limit)
      return entry;
  return nullptr;
}

}  // namespace wnfused::gpu

// The ops residual_stage and residual_stage_backward as launches of a configuration's kernels, on plain pointers and
// one workspace: the torch entry (residual_stage.cu) and the emulation call the same functions.
#pragma once

#include "cuda/stage_table.h"

namespace wnfused::gpu {

struct StageProblem {
  int64_t images, blocks;
  float skip_scale;
  int64_t recompute;  // 0: the maps are every convolution's operand; k: h before every k-th block
  Values v, g, bias;
};

struct StageForwardCall {
  StageProblem problem;
  ExternalMap x, y;
  float* norm;
  void* maps;      // null: not wanted
  uint8_t* signs;  // likewise; stage_tile.h has their order. With recompute there are none
};

struct StageBackwardCall {
  StageProblem problem;
  ExternalMap dy, dx;
  const float* norm;
  const void* maps;
  const uint8_t* signs;
  bool parameters;  // whether dv, dg and dbias are wanted
  Values dv, dg, dbias;
  // Gradients of all convolutions' outputs are as large as the maps, so the backward goes through the blocks in
  // segments whose gradients take this much. One of large maps still fills a GPU: 64 blocks of 128 maps of 16 x 32 x 32
  // in bf16.
  int64_t segment_bytes = int64_t{1} << 29;
  // Multiprocessors that the weight gradient's blocks of threads are cut for, by slices of the batch: an H100's. A
  // constant, so that the bits depend on the configuration alone, which from sm_90 on may be another.
  int64_t gradient_multiprocessors = 132;
};

// Of the signs of `blocks` blocks' activations.
int64_t sign_bytes(const StageEntry& entry, int64_t images, int64_t blocks);

// Bytes that a call needs besides its outputs.
int64_t workspace_bytes(const StageEntry& entry, const StageForwardCall& call);
int64_t workspace_bytes(const StageEntry& entry, const StageBackwardCall& call);

// Enqueue the call's kernels; the first status that is not success ends it.
Status enqueue(const StageEntry& entry, const StageForwardCall& call, char* workspace, Queue queue);
Status enqueue(const StageEntry& entry, const StageBackwardCall& call, char* workspace, Queue queue);

// The configuration of a table for these maps whose kernels need at most `shared_limit` bytes a block, or null.
const StageEntry* find_entry(const StageEntry* table, int64_t channels, int64_t height, int64_t width,
                             int64_t shared_limit);

}  // namespace wnfused::gpu

// One call of the residual stage, as the op entries hand it to the kernels of an instruction set.
//
// For block b = 0..B-1, with effective weights w = s v, s = g / ||v|| a row:
//   a_b     = relu(s_0 conv(h_b, v_0) + bias_0)
//   h_{b+1} = skip_scale (h_b + s_1 conv(a_b, v_1) + bias_1)
//
// Its convolutions are those of geometry.h, its layouts those of memory.h, and one more:
//   operand  [N, H, W, C] bfloat16        what the convolutions on pairs of bfloat16 read: h, a, dh, da rounded
// Where C needs no padding and everything is fp32, the canonical saved maps [.., N, H, W, C] ARE maps in this sense and
// the kernels write and read them in place; otherwise an epilogue stores a converted copy. In bfloat16 the saved maps
// are the operands, with recomputation fp32.
#pragma once

#include <atomic>
#include <cstdint>

#include "cpu/conv/memory.h"
#include "cpu/conv3x3/geometry.h"
#include "cpu/machine/work_queue.h"

namespace wnfused::cpu {

// The canonical maps [.., N, H, W, C]. every == 0: h_b and a_b of every block; every == k: h_b where k divides b, fp32.
struct SavedMaps {
  void* data;  // null: nothing is saved
  bool bfloat16;
  int64_t every;
  bool in_place;  // every == 0 and the saved maps have the kernels' own layout
};

struct StageForward {
  Geometry geometry;
  ExternalMap x, y;
  Parameter v, g, bias;
  float skip_scale;
  bool round_operands;  // operands of the convolutions are bfloat16, held as fp32
  float* norm;
  SavedMaps saved;
  Scratch scratch;
  std::atomic<bool>* poisoned;  // set when a value is not finite
};

struct StageBackward {
  Geometry geometry;
  ExternalMap dy, dx;
  Parameter v, g, bias;
  Parameter dv, dg, dbias;
  bool parameters;
  float skip_scale;
  bool round_operands;
  const float* norm;
  SavedMaps saved;
  Scratch scratch;
  std::atomic<bool>* poisoned;
};

// What an instruction set provides. Every worker of a call runs the same function.
struct StageKernels {
  void (*forward)(const StageForward&, Worker&);
  void (*backward)(const StageBackward&, Worker&);
};

namespace avx512 {
extern const StageKernels stage_kernels;
}
namespace avx2 {
extern const StageKernels stage_kernels;
}
namespace portable {
extern const StageKernels stage_kernels;
}

// What an instruction set provides that multiplies pairs of bfloat16.
struct StagePairKernels {
  PairTile tile;
  StageKernels kernels;
};

namespace avx512_bf16 {
extern const StagePairKernels stage_pair_kernels;
}
namespace amx {
extern const StagePairKernels stage_pair_kernels;
}
namespace amx_emulated {
extern const StagePairKernels stage_pair_kernels;
}

}  // namespace wnfused::cpu

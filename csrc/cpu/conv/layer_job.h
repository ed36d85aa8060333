// A single convolution layer, as its call hands it to the kernels of an instruction set (conv_layer.h).
#pragma once

#include <atomic>

#include "cpu/conv/division.h"
#include "cpu/conv/memory.h"
#include "cpu/layer/layer.h"
#include "cpu/machine/work_queue.h"

namespace wnfused::cpu {

// How the kernels come at a map of the caller's: by a copy made before or after the products, where it is, or panel by
// panel as it is read or written.
enum class Access { kCopy, kInPlace, kPanels };

// A map of the caller's and, in the kernels' layout, the memory for it, if it has any.
struct LayerMap {
  ExternalMap given;  // data null: there is none
  float* own;
  Access access;
  bool dense;  // channels of a pixel, and then pixels, lie one after another, be they whole blocks or not

  bool is_in_place() const { return access == Access::kInPlace; }
  bool is_copied() const { return given.data && access == Access::kCopy; }
};

// What the items of a convolution read and write, and the ending of its sums.
struct LayerMaps {
  const LayerMap &source, &target, &residual;
  const float* bias;
  Activation activation;
  float slope;
};

// Memory of the caller's for a forward's bank, of a layer whose weights do not change.
struct KeptBank {
  Bank bank;
  bool packed;  // by an earlier call of the same layer and method
};

// G: Geometry, Pieces, Window, Depthwise or PairWindow, whose maps' memory holds bfloat16.
template <class G>
struct ConvForward {
  G geometry;              // from x's map to y's
  MapShape input, output;  // x's and y's
  LayerMap x, y, residual;
  Parameter v, g, bias;  // g's data null: w = v, and nothing of norms or dg is read or written
  float* norm;
  Activation activation;
  float slope;
  const KeptBank* kept;  // null: banks are packed for this call
  Scratch scratch;
  std::atomic<bool>* poisoned;
  static constexpr bool round_operands = false;

  bool is_packed() const { return kept && kept->packed; }
};

template <class G>
struct ConvBackward {
  G geometry, back;  // from x's map to y's; from y's map to x's
  MapShape input, output;  // x's and y's
  LayerMap x, y, dy, dz, dx;  // dz.own may be dy's memory
  bool make_dz, weight;       // weight: dv, dg and db are wanted
  bool is_transposed;
  Parameter v, g, bias;
  Parameter dv, dg, dbias;
  float* bias_sums;  // of the runs of y's pixels, in order: of a transposed layer, or on pairs; else null
  const float* norm;
  Activation activation;
  float slope;
  Scratch scratch;
  std::atomic<bool>* poisoned;
  static constexpr bool round_operands = false;
  static constexpr bool is_packed() { return false; }

  // Whose weight gradient it is, and whether y's pixels are summed for the bias.
  const G& products() const { return is_transposed ? back : geometry; }
  bool sums_bias() const { return is_transposed && weight && dbias.data; }
};

template <class G>
struct ConvKernels {
  void (*forward)(const ConvForward<G>&, Worker&);
  void (*backward)(const ConvBackward<G>&, Worker&);
};

}  // namespace wnfused::cpu

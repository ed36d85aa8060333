// The pass over a fresh product, y = act(s z + b + residual) in place, and its transpose, dz = act'(y) dy with the
// bias gradient on the way.
//
//      columns   line p = | C channels |        s, b, db run along the line, in L1
//      planes    line c = | H W pixels |        s, b, db are one number a line
//
// Floor: one read and one write of z; dy and y in, dz and s dz out. Eager's bias and ReLU passes cost as much.
#pragma once

#include "cpu/vec/runs.h"

namespace wnfused::cpu::WNFUSED_ISA {

template <Activation kActivation>
WNFUSED_INLINE Block activate(const Block& z, const Block& slope) {
  if constexpr (kActivation == Activation::kNone) return z;
  if constexpr (kActivation == Activation::kRelu) return relu(z);
  return leaky_mask(z, z, slope);
}

// A slope of 0 gives 0 even for an infinite dy: with_mask sees to that.
template <Activation kActivation>
WNFUSED_INLINE Block masked(const Block& dy, const Block& y, const Block& slope) {
  if constexpr (kActivation == Activation::kNone) return dy;
  if constexpr (kActivation == Activation::kRelu) return relu_mask(y, dy);
  return leaky_mask(y, dy, slope);
}

template <class Visit>
WNFUSED_INLINE void with_activation(Activation activation, const Visit& visit) {
  switch (activation) {
    case Activation::kNone: return visit(std::integral_constant<Activation, Activation::kNone>{});
    case Activation::kRelu: return visit(std::integral_constant<Activation, Activation::kRelu>{});
    default: return visit(std::integral_constant<Activation, Activation::kLeakyRelu>{});
  }
}

// The same for `masked`.
template <class Visit>
WNFUSED_INLINE void with_mask(Activation activation, float slope, const Visit& visit) {
  const bool zero_slope = activation == Activation::kLeakyRelu && slope == 0;
  with_activation(zero_slope ? Activation::kRelu : activation, visit);
}

// Where the product is scaled already and only an activation is left, the results are entries of the product or 0.
template <bool kScales, Activation kActivation, class T>
WNFUSED_INLINE bool epilogue_lines(const Lines& lines, const Epilogue& task, T* z, const T* residual) {
  const Block slope = splat(task.slope);
  Block nothing = zero();  // NaN once a sum is not finite
  for (int64_t line = lines.begin; line < lines.end; ++line) {
    T* run = z + line * lines.length;
    const T* added = residual ? residual + line * lines.length : nullptr;
    const int64_t channel = lines.columns ? 0 : line % lines.channels;
    const Block line_scale = splat(lines.columns || !kScales ? 0.0f : task.scale[channel]);
    const Block line_bias = splat(lines.columns || !kScales ? 0.0f : task.bias[channel]);
    for_blocks(lines.length, [&](int64_t i, auto move) __attribute__((always_inline)) {
      Block sum = move.load(run + i);
      if constexpr (kScales) {
        const Block scale = lines.columns ? move.load(task.scale + i) : line_scale;
        const Block bias = lines.columns ? move.load(task.bias + i) : line_bias;
        sum = multiply_add(sum, scale, bias);
        nothing = multiply_add(sum, zero(), nothing);
      } else if (!added && kActivation != Activation::kLeakyRelu) {
        return move.store_exact(run + i, activate<kActivation>(sum, slope));
      }
      if (added) sum = sum + move.load(added + i);
      move.store(run + i, activate<kActivation>(sum, slope));
    });
  }
  return sum_of(nothing) == 0;
}

inline bool epilogue(const Lines& lines, const Epilogue& task) {
  bool finite = true;
  with_activation(task.activation, [&](auto activation) __attribute__((always_inline)) {
    with_entries(task.z, [&](auto* z) __attribute__((always_inline)) {
      const auto run = task.scale ? epilogue_lines<true, activation.value, std::remove_pointer_t<decltype(z)>>
                                  : epilogue_lines<false, activation.value, std::remove_pointer_t<decltype(z)>>;
      finite = run(lines, task, z, static_cast<decltype(z)>(task.residual.data));
    });
  });
  return finite;
}

// Entries of dy or 0, unless a slope scaled them.
template <Activation kActivation, class Move, class T>
WNFUSED_INLINE void store_gradient(const Move& move, T* dz, const Block& gradient) {
  if constexpr (kActivation == Activation::kLeakyRelu) move.store(dz, gradient);
  else move.store_exact(dz, gradient);
}

// Columns of few channels, a multiple of 16: the bias gradient stays in registers, where one in memory would have each
// line wait for the line before.
template <int kBlocks, Activation kActivation, class T>
WNFUSED_INLINE void mask_narrow(const Lines& lines, const Mask& task, const T* dy, const T* y, T* dz, T* scaled) {
  const Block slope = splat(task.slope);
  Block sum[kBlocks];
  WNFUSED_UNROLL for (int b = 0; b < kBlocks; ++b) sum[b] = load(task.bias_gradient + b * kLanes);
  for (int64_t line = lines.begin; line < lines.end; ++line) {
    WNFUSED_UNROLL for (int b = 0; b < kBlocks; ++b) {
      const int64_t at = line * lines.length + b * kLanes;
      Block gradient = load(dy + at);
      if constexpr (kActivation != Activation::kNone) gradient = masked<kActivation>(gradient, load(y + at), slope);
      if (dz) store_gradient<kActivation>(Whole{}, dz + at, gradient);
      if (scaled) store(scaled + at, gradient * load(task.scale + b * kLanes));
      sum[b] = sum[b] + gradient;
    }
  }
  WNFUSED_UNROLL for (int b = 0; b < kBlocks; ++b) store(task.bias_gradient + b * kLanes, sum[b]);
}

constexpr int64_t kSumPiece = 64 * kLanes;

template <Activation kActivation, class T>
WNFUSED_INLINE void mask_lines(const Lines& lines, const Mask& task, const T* dy, const T* y, T* dz, T* scaled) {
  if (lines.columns && task.bias_gradient) {
    if (lines.length == kLanes) return mask_narrow<1, kActivation>(lines, task, dy, y, dz, scaled);
    if (lines.length == 2 * kLanes) return mask_narrow<2, kActivation>(lines, task, dy, y, dz, scaled);
    if (lines.length == 4 * kLanes) return mask_narrow<4, kActivation>(lines, task, dy, y, dz, scaled);
  }
  const Block slope = splat(task.slope);
  for (int64_t line = lines.begin; line < lines.end; ++line) {
    const int64_t at = line * lines.length;
    const int64_t channel = lines.columns ? 0 : line % lines.channels;
    const Block line_scale = splat(scaled && !lines.columns ? task.scale[channel] : 1.0f);
    Block line_sum = zero(), piece = zero();
    for_blocks(lines.length, [&](int64_t i, auto move) __attribute__((always_inline)) {
      const Block upstream = move.load(dy + at + i);
      Block gradient = upstream;
      if constexpr (kActivation != Activation::kNone)
        gradient = masked<kActivation>(upstream, move.load(y + at + i), slope);
      if (dz) store_gradient<kActivation>(move, dz + at + i, gradient);
      if (scaled) {
        const Block scale = lines.columns ? move.load(task.scale + i) : line_scale;
        move.store(scaled + at + i, gradient * scale);
      }
      if (lines.columns) {
        if (task.bias_gradient) move.store(task.bias_gradient + i, gradient + move.load(task.bias_gradient + i));
      } else {
        piece = piece + gradient;
        if (i % kSumPiece == 0) {  // a sum rounds as often as a piece has Blocks and the line pieces
          line_sum = line_sum + piece;
          piece = zero();
        }
      }
    });
    if (!lines.columns && task.bias_gradient) task.bias_gradient[line] = sum_of(line_sum + piece);
  }
}

inline void mask(const Lines& lines, const Mask& task) {
  with_mask(task.activation, task.slope, [&](auto activation) __attribute__((always_inline)) {
    with_entries(task.dy, [&](auto* dy) __attribute__((always_inline)) {
      using T = decltype(dy);
      mask_lines<activation.value>(lines, task, dy, static_cast<T>(task.y.data), static_cast<T>(task.dz.data),
                                   static_cast<T>(task.scaled.data));
    });
  });
}

}  // namespace wnfused::cpu::WNFUSED_ISA

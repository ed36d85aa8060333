#include "cpu/conv_layer/pair_layer.h"

#include "cpu/conv_layer/describe.h"
#include "cpu/machine/isa.h"

namespace wnfused::cpu {
namespace {

using torch::stable::Tensor;

// A map of operands is read and written where it is.
void choose_access(const MapShape& shape, LayerMap& map) {
  if (!map.given.data || !is_dense(map.given, shape)) return;
  map.own = static_cast<float*>(map.given.data);
  map.access = Access::kInPlace;
}

// Pixels that meet one pixel each are one line of as many: whole tiles of them, whatever the size of a map.
ConvShape flattened(ConvShape shape) {
  if (shape.taps() > 1 || shape.stride.product() > 1 || !(shape.padding == Triple{0, 0, 0})) return shape;
  shape.size = {1, 1, shape.images * shape.size.product()};
  shape.images = 1;
  return shape;
}

PairWindow window_of(const ConvLayer& layer, bool back) {
  return make_pair_window(flattened(layer.shape), layer.transposed != back, pair_window_kernels()->tile,
                          workers_for(layer.shape));
}

void lay_out_forward(Arena& arena, ConvForward<PairWindow>& job, int64_t workers) {
  lay_out_common(arena, job.geometry, job.kept ? 0 : 1, workers, worker_floats(job.geometry), job.scratch);
  if (job.kept) job.scratch.bank[0] = job.kept->bank;
  lay_out_copy(arena, operand_floats(job.input), job.x);
  lay_out_copy(arena, operand_floats(job.output), job.y);
  lay_out_copy(arena, operand_floats(job.output), job.residual);
}

void lay_out_backward(Arena& arena, ConvBackward<PairWindow>& job, int64_t workers) {
  const int64_t floats = std::max(worker_floats(job.geometry), worker_floats(job.back));
  lay_out_common(arena, job.back, 1, workers, floats, job.scratch);
  if (job.weight) {
    job.scratch.gradient[0] = arena.take(job.products().gradient_size() * job.products().wgrad_slices);
    lay_out_copy(arena, operand_floats(job.input), job.x);
  }
  lay_out_copy(arena, operand_floats(job.input), job.dx);
  if (!job.make_dz) job.dz.own = job.dy.own;
  else if (!job.dz.is_in_place()) job.dz.own = arena.take(operand_floats(job.output));
  if (job.weight && job.dbias.data) job.bias_sums = arena.take(job.output.runs() * job.output.padded_channels);
}

}  // namespace

const PairWindowKernels* pair_window_kernels() {
  switch (active_pair_products()) {
#if defined(__x86_64__)
    case PairProducts::kTiles:
      return &amx::pair_window_kernels;
    case PairProducts::kDots:
      return &avx512_bf16::pair_window_kernels;
#endif
    case PairProducts::kEmulatedTiles:
      return &amx_emulated::pair_window_kernels;
    default:
      return nullptr;
  }
}

// All workers share a kept bank, which has room for all blocks.
PairWindow with_shared_bank(const ConvLayer& layer) {
  PairWindow window = window_of(layer, false);
  window.own_banks = window.narrow_banks = false;
  return window;
}

bool run_pair_layer(const ConvLayer& layer, const std::optional<Tensor>& residual, const Tensor& y, float* norm,
                    const KeptBank* kept) {
  ConvForward<PairWindow> job{};
  describe(layer, job);
  job.y = map_of(y, job.output, layer.matrix);
  job.residual = map_of(residual, job.output, layer.matrix);
  choose_access(job.input, job.x);
  for (LayerMap* map : {&job.y, &job.residual}) choose_access(job.output, *map);
  job.norm = norm;
  job.kept = kept;
  job.geometry = kept ? with_shared_bank(layer) : window_of(layer, false);
  const int64_t workers = std::min(workers_for(layer.shape), job.geometry.conv_items());
  return run_once(job, workers, lay_out_forward, pair_window_kernels()->of(layer.transposed).forward);
}

KeptFloats kept_pair_floats(const ConvLayer& layer) {
  const PairWindow window = with_shared_bank(layer);
  return {window.bank_size(), window.padded_outputs};
}

bool run_pair_layer_backward(const ConvLayer& layer, const Tensor& dy, const Tensor& y, const float* norm,
                             const ConvGradients& gradients) {
  ConvBackward<PairWindow> job{};
  describe_backward(layer, dy, y, norm, gradients, job);
  for (LayerMap* map : {&job.x, &job.dx}) choose_access(job.input, *map);
  for (LayerMap* map : {&job.dy, &job.y, &job.dz}) choose_access(job.output, *map);
  job.make_dz = layer.activation != Activation::kNone || job.dy.is_copied();
  job.geometry = window_of(layer, false);
  job.back = window_of(layer, true);
  const int64_t items = job.back.conv_items() + (job.weight ? job.products().wgrad_items() : 0);
  const int64_t workers = std::min(workers_for(layer.shape), items);
  return run_once(job, workers, lay_out_backward, pair_window_kernels()->of(layer.transposed).backward);
}

}  // namespace wnfused::cpu

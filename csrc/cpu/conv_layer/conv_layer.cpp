// A single convolution's geometry, instruction set, maps and scratch. See conv_layer.h.
#include "cpu/conv_layer/conv_layer.h"

#include <algorithm>
#include <type_traits>

#include "cpu/conv_layer/describe.h"
#include "cpu/conv_layer/pair_layer.h"
#include "cpu/machine/isa.h"

namespace wnfused::cpu {
namespace {

template <class G>
const ConvKernels<G>& kernels(bool transposed) {
  const auto chosen = [&](const auto& winograd, const auto& pieces, const auto& depthwise, const auto& direct,
                          const auto& other) -> const ConvKernels<G>& {
    if constexpr (std::is_same_v<G, Geometry>) return winograd;
    else if constexpr (std::is_same_v<G, Pieces>) return pieces;
    else if constexpr (std::is_same_v<G, Depthwise>) return depthwise;
    else return transposed ? other : direct;
  };
#if defined(__x86_64__)
  switch (active_isa()) {
    case Isa::kAvx512:
      return chosen(avx512::winograd_kernels, avx512::pieces_kernels, avx512::depthwise_kernels,
                    avx512::direct_kernels, avx512::transposed_kernels);
    case Isa::kAvx2:
      return chosen(avx2::winograd_kernels, avx2::pieces_kernels, avx2::depthwise_kernels,
                    avx2::direct_kernels, avx2::transposed_kernels);
    default:
      break;
  }
#endif
  return chosen(portable::winograd_kernels, portable::pieces_kernels, portable::depthwise_kernels,
                portable::direct_kernels, portable::transposed_kernels);
}

// What the kernels sum: y, from x's map to y's; dv, from the same two maps; or dx, from y's map back to x's.
enum class Sum { kOutput, kWeightGradient, kDataGradient };

template <class G>
G geometry_of(const ConvLayer& layer, Sum sum) {
  const ConvShape& shape = layer.shape;
  const int64_t workers = workers_for(shape);
  const bool back = sum == Sum::kDataGradient;
  if constexpr (std::is_same_v<G, Depthwise>) {
    return make_depthwise(shape, back, sum == Sum::kOutput ? forward_shares(workers) : backward_shares(shape));
  } else if constexpr (std::is_same_v<G, Pieces>) {
    return make_pieces(shape, back, workers);
  } else if constexpr (std::is_same_v<G, Window>) {
    if (layer.transposed != back) return backward_window(shape, workers);
    return forward_window(shape, !layer.transposed && shape.has_thin_input(), workers);
  } else {
    const int64_t inputs = back ? shape.outputs : shape.inputs, outputs = back ? shape.inputs : shape.outputs;
    return make_single_geometry(shape.images, {shape.size.level, shape.kernel.level}, {inputs, outputs, shape.groups},
                                shape.size.row, shape.size.column, layer.method, workers);
  }
}

// Floats of the map that a convolution reads, where it is copied.
int64_t source_size(const Geometry& geometry) { return geometry.map_size(); }
int64_t source_size(const Pieces& geometry) { return geometry.source.map_size(); }
int64_t source_size(const Window& window) { return window.padded_size(); }

// Uses a map in place that would be copied only because its channels are not whole blocks.
void take_in_place(LayerMap& map) {
  map.own = static_cast<float*>(map.given.data);
  map.access = Access::kInPlace;
}

// A map that suits the items needs no copy; a thin one may need the border.
template <class G>
void choose_source_access(G&, LayerMap&) {}
void choose_source_access(Window& window, LayerMap& map) {
  if (window.has_border()) {
    map.access = Access::kCopy;
  } else if (map.is_copied() && map.dense) {
    take_in_place(map);
    window.pixel = window.source.channels;
  } else if (map.is_copied() && window.is_pointwise() && !window.thin) {
    map.access = Access::kPanels;
  }
}

template <class G>
void choose_target_access(G&, LayerMap&, LayerMap&) {}
void choose_target_access(Window& window, LayerMap& target, LayerMap& residual) {
  if (!target.is_copied()) return;
  if (target.dense && !residual.given.data) {
    take_in_place(target);
    window.target_pixel = window.target.channels;
    return;
  }
  if (!window.is_run()) return;
  target.access = Access::kPanels;
  residual.access = Access::kPanels;
}

// The same choice for the weight gradient, which reads dz, or a transposed layer's x, by whole blocks.
template <class G>
void choose_gradient_access(G&, bool, LayerMap&) {}
void choose_gradient_access(Window& window, bool transposed, LayerMap& x) {
  if (window.has_border()) {
    x.access = Access::kCopy;
  } else if (x.is_copied() && x.dense && !transposed && !window.has_product_gradient()) {
    take_in_place(x);
    window.pixel = window.source.channels;
  }
}

void pack_by_bundles(Pieces& geometry, int64_t) { narrow_banks(geometry); }
void pack_by_bundles(Depthwise&, int64_t) {}

// A kept bank has this layout and room for all groups, and all workers share it.
template <class G>
void share_bank(G& geometry, int64_t plane_stride) {
  geometry.own_banks = geometry.narrow_banks = false;
  geometry.plane_stride = plane_stride;
}

template <class G>
int64_t packing_of(const G&) {
  return 0;
}
int64_t packing_of(const Geometry& geometry) { return packing_offset(geometry); }

void finish_with_sums(Pieces&, int64_t) {}
void finish_with_sums(Window&, int64_t) {}
void finish_with_sums(Depthwise&, int64_t) {}

// Floats of the slices' banks of a weight gradient, unless they are workers' own.
template <class G>
int64_t gradient_banks(const G& geometry) {
  return geometry.gradient_size() * geometry.wgrad_slices;
}
int64_t gradient_banks(const Geometry& geometry) {
  return geometry.wgrad_finishes ? 0 : geometry.gradient_size() * geometry.wgrad_slices;
}

// Items that mask pixels hold a run of them.
int64_t pixel_floats(const MapShape& shape) { return kMapPixels * shape.padded_channels; }

// A worker's bank and, behind its bias, a note of which blocks it has packed (depthwise/driver.h).
void lay_out_banks(Arena& arena, const Depthwise& layer, int64_t workers, int64_t worker_floats, Scratch& scratch) {
  scratch.own_bank_stride = layer.bank_size() + 2 * layer.padded_outputs + kLanes + kApart;
  scratch.own_bank = arena.take(scratch.own_bank_stride * workers);
  scratch.worker_stride = worker_floats + 3 * kLanes + kApart;
  scratch.worker = arena.take(scratch.worker_stride * workers);
}

void lay_out(Arena& arena, ConvForward<Depthwise>& job, int64_t workers) {
  const Depthwise& layer = job.geometry;
  const DepthwiseRoom room = forward_room(layer);
  lay_out_banks(arena, layer, workers, ((layer.blocks_at_once + 1) * room.x + 2 * room.y) * kLanes, job.scratch);
}

void lay_out(Arena& arena, ConvBackward<Depthwise>& job, int64_t workers) {
  const Depthwise& layer = job.geometry;
  const DepthwiseRoom room = backward_room(layer, job.back);
  const int64_t blocks = layer.blocks_at_once, sums = blocks * (layer.planes + 1) * kLanes;
  const int64_t item = ((blocks + 1) * room.x + (blocks + 2) * room.y + room.dx) * kLanes;
  lay_out_banks(arena, layer, workers, sums + item, job.scratch);
  if (!job.weight) return;
  job.scratch.gradient[0] = arena.take(layer.gradient_size() * layer.wgrad_slices);
  job.scratch.bias_gradient[0] = arena.take(layer.padded_outputs * layer.wgrad_slices);
}

template <class G>
void lay_out(Arena& arena, ConvForward<G>& job, int64_t workers) {
  lay_out_common(arena, job.geometry, job.kept ? 0 : 1, workers, worker_floats(job.geometry), job.scratch);
  if (job.kept) job.scratch.bank[0] = job.kept->bank;
  job.scratch.packing = packing_of(job.geometry);
  lay_out_copy(arena, source_size(job.geometry), job.x);
  lay_out_copy(arena, job.output.map_size(), job.y);
  lay_out_copy(arena, job.output.map_size(), job.residual);
}

template <class G>
void lay_out(Arena& arena, ConvBackward<G>& job, int64_t workers) {
  const G &geometry = job.geometry, &products = job.products();
  // Both geometries' items run on the same scratch.
  const int64_t floats =
      std::max({worker_floats(geometry), worker_floats(job.back), pixel_floats(job.output)});
  lay_out_common(arena, job.back, 1, workers, floats, job.scratch);
  job.scratch.packing = packing_of(job.back);
  if (job.weight) {
    job.scratch.gradient[0] = arena.take(gradient_banks(products));
    job.scratch.bias_gradient[0] = arena.take(products.padded_outputs * products.wgrad_slices);
    lay_out_copy(arena, source_size(geometry), job.x);
  }
  lay_out_copy(arena, job.input.map_size(), job.dx);
  if (!job.make_dz) job.dz.own = job.dy.own;
  else if (!job.dz.is_in_place()) job.dz.own = arena.take(job.output.map_size());
  if (job.sums_bias()) job.bias_sums = arena.take(job.output.runs() * job.output.padded_channels);
}

const auto lay_out_any = [](Arena& arena, auto& job, int64_t workers) { lay_out(arena, job, workers); };

template <class G>
bool forward(const ConvLayer& layer, const std::optional<Tensor>& residual, const Tensor& y, float* norm,
             const KeptBank* kept) {
  ConvForward<G> job{};
  describe(layer, job);
  job.geometry = geometry_of<G>(layer, Sum::kOutput);
  job.kept = kept;
  const int64_t stride = job.geometry.plane_stride;
  pack_by_bundles(job.geometry, workers_for(layer.shape));
  if (kept) share_bank(job.geometry, stride);
  job.y = map_of(y, job.output, layer.matrix);
  job.residual = map_of(residual, job.output, layer.matrix);
  choose_source_access(job.geometry, job.x);
  choose_target_access(job.geometry, job.y, job.residual);
  job.norm = norm;
  const int64_t workers = std::min(workers_for(layer.shape), job.geometry.conv_items());
  return run_once(job, workers, lay_out_any, kernels<G>(layer.transposed).forward);
}

template <class G>
bool backward(const ConvLayer& layer, const Tensor& dy, const Tensor& y, const float* norm,
              const ConvGradients& gradients) {
  ConvBackward<G> job{};
  describe_backward(layer, dy, y, norm, gradients, job);
  job.geometry = geometry_of<G>(layer, Sum::kWeightGradient);
  finish_with_sums(job.geometry, workers_for(layer.shape));
  job.back = geometry_of<G>(layer, Sum::kDataGradient);
  // A transposed layer's geometry serves its weight gradient, too, whose planes hold all blocks.
  if (!layer.transposed) pack_by_bundles(job.back, workers_for(layer.shape));
  LayerMap none{};
  choose_target_access(job.back, job.dx, none);
  choose_gradient_access(job.geometry, layer.transposed, job.x);
  job.make_dz = layer.activation != Activation::kNone || job.dy.is_copied();
  const int64_t items = job.back.conv_items() + (job.weight ? job.products().wgrad_items() : 0);
  return run_once(job, std::min(workers_for(layer.shape), items), lay_out_any, kernels<G>(layer.transposed).backward);
}

}  // namespace

bool run_conv_layer(const ConvLayer& layer, const std::optional<Tensor>& residual, const Tensor& y, float* norm,
                    const KeptBank* kept) {
  if (layer.method == Method::kPairs) return run_pair_layer(layer, residual, y, norm, kept);
  const auto run = layer.method == Method::kPieces   ? forward<Pieces>
                   : layer.method != Method::kDirect ? forward<Geometry>
                   : layer.shape.is_depthwise()      ? forward<Depthwise>
                                                     : forward<Window>;
  return run(layer, residual, y, norm, kept);
}

KeptFloats kept_floats(const ConvLayer& layer) {
  const auto floats = [](const auto& geometry) { return KeptFloats{geometry.bank_size(), geometry.padded_outputs}; };
  if (layer.method == Method::kPairs) return kept_pair_floats(layer);
  if (layer.method == Method::kPieces) return floats(geometry_of<Pieces>(layer, Sum::kOutput));
  if (layer.method != Method::kDirect) return floats(geometry_of<Geometry>(layer, Sum::kOutput));
  return floats(geometry_of<Window>(layer, Sum::kOutput));
}

bool run_conv_layer_backward(const ConvLayer& layer, const Tensor& dy, const Tensor& y, const float* norm,
                             const ConvGradients& gradients) {
  if (layer.method == Method::kPairs) return run_pair_layer_backward(layer, dy, y, norm, gradients);
  const auto run = layer.method == Method::kPieces   ? backward<Pieces>
                   : layer.method != Method::kDirect ? backward<Geometry>
                   : layer.shape.is_depthwise()      ? backward<Depthwise>
                                                     : backward<Window>;
  return run(layer, dy, y, norm, gradients);
}

}  // namespace wnfused::cpu

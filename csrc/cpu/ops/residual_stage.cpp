// The ops residual_stage and residual_stage_backward on CPU: checks, output tensors, scratch, and the choice of method
// and instruction set. The mathematics and the layouts stand in stage.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <type_traits>

#include "cpu/conv/scratch.h"
#include "cpu/machine/isa.h"
#include "cpu/machine/parallel.h"
#include "cpu/machine/workspace.h"
#include "cpu/stage/stage.h"
#include "stage_arguments.h"

namespace wnfused::cpu {
namespace {

using stage::checked_parameters;
using stage::empty_map_like;
using stage::is_bfloat16;
using stage::Parameters;
using stage::SavedShape;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor empty_of(std::initializer_list<int64_t> sizes, ScalarType dtype) {
  return torch::stable::empty(torch::headeronly::IntHeaderOnlyArrayRef(sizes.begin(), sizes.size()), dtype);
}

// Kernels take inputs and outputs alike. An input is not written to, so one that is copied on writing is not copied.
void* memory_of_input(const Tensor& tensor) { return const_cast<void*>(tensor.const_data_ptr()); }

ExternalMap external_map(const Tensor& x) {
  return {memory_of_input(x), is_bfloat16(x), x.stride(0), x.stride(1), x.stride(2), x.stride(3)};
}

// So many weights have a gradient that leaves the nearer caches before an optimiser reads it.
constexpr int64_t kFarWeights = 1 << 19;

Parameter parameter(const Tensor& tensor) { return {memory_of_input(tensor), is_bfloat16(tensor)}; }

// Saved maps in which the kernels read and write what they need.
bool in_place(const Geometry& geometry, const SavedMaps& saved) {
  if (!saved.data || saved.every > 0) return false;
  return geometry.is_pairs() || (!saved.bfloat16 && geometry.channels == geometry.padded_channels);
}

const StageKernels& float_kernels() {
#if defined(__x86_64__)
  switch (active_isa()) {
    case Isa::kAvx512:
      return avx512::stage_kernels;
    case Isa::kAvx2:
      return avx2::stage_kernels;
    default:
      break;
  }
#endif
  return portable::stage_kernels;
}

// Null where bfloat16 is multiplied as float: without such products, and where dot products, twice as many a cycle,
// would lose to float's F(4x4, 3x3), which needs a quarter of them. Tiles make sixteen times as many.
const StagePairKernels* pair_kernels([[maybe_unused]] Method float_method) {
  switch (active_pair_products()) {
#if defined(__x86_64__)
    case PairProducts::kTiles:
      return &amx::stage_pair_kernels;
    case PairProducts::kDots:
      return float_method == Method::kWinograd4 ? nullptr : &avx512_bf16::stage_pair_kernels;
#endif
    case PairProducts::kEmulatedTiles:
      return &amx_emulated::stage_pair_kernels;
    default:
      return nullptr;
  }
}

int64_t workers_for(const Geometry& geometry, bool parameters) {
  const int64_t items = geometry.conv_items() + geometry.channel_blocks + (parameters ? geometry.wgrad_items() : 0);
  return std::clamp<int64_t>(items, 1, worker_limit());
}

// Pieces that the forward and the backward share.
void lay_out(Arena& arena, const Geometry& geometry, int64_t workers, Scratch& scratch) {
  lay_out_common(arena, geometry, 2, workers, worker_floats(geometry), scratch);
  scratch.packing = packing_offset(geometry);
  scratch.stream = arena.take(geometry.map_size());
  if (geometry.is_pairs()) scratch.operand = arena.take(geometry.operand_size());
}

void lay_out_forward(Arena& arena, StageForward& job, int64_t workers) {
  lay_out(arena, job.geometry, workers, job.scratch);
  if (!job.saved.in_place) job.scratch.hidden = arena.take(job.geometry.operand_size());
}

void lay_out_backward(Arena& arena, StageBackward& job, int64_t workers) {
  const Geometry& geometry = job.geometry;
  Scratch& scratch = job.scratch;
  lay_out(arena, geometry, workers, scratch);
  scratch.hidden = arena.take(geometry.operand_size());
  if (job.parameters) {
    for (float*& gradient : scratch.gradient) gradient = arena.take(geometry.gradient_size() * geometry.wgrad_slices);
    for (float*& gradient : scratch.bias_gradient)
      gradient = arena.take(geometry.padded_channels * geometry.wgrad_slices);
  }
  if (job.saved.in_place) return;
  const int64_t blocks = job.saved.every == 0 ? 1 : std::min(job.saved.every, geometry.blocks);
  if (geometry.is_pairs()) scratch.recomputed = arena.take(geometry.map_size());
  scratch.saved_stream = arena.take(geometry.operand_size() * blocks);
  scratch.saved_hidden = arena.take(geometry.operand_size() * blocks);
}

// One run of `job`, whose geometry is set, by `run` of the kernels. False when it met a value that is not finite.
template <class Job, class LayOut, class Run>
bool run_with_maps(Job& job, bool parameters, const LayOut& lay_out, const Run& run) {
  job.saved.in_place = in_place(job.geometry, job.saved);
  return run_once(job, workers_for(job.geometry, parameters), lay_out, run);
}

// For tests: the name, as name_of() has it, of the method that maps of this shape get on the active instruction set.
std::string cpu_stage_method(int64_t images, int64_t channels, int64_t height, int64_t width, bool bfloat16) {
  Method method = preferred_method(images, height, width);
  if (const StagePairKernels* pairs = bfloat16 ? pair_kernels(method) : nullptr)
    method = make_pair_geometry(images, channels, height, width, 1, pairs->tile, worker_limit()).method;
  return name_of(method);
}

// Runs `job` on maps like x with the method that suits them; once more with the direct method, which computes what a
// convolution is defined as, when something was not finite.
template <class Job, class LayOut, class Run>
void run_stage(const Tensor& x, int64_t blocks, Job& job, bool parameters, const LayOut& lay_out,
               Run StageKernels::*run) {
  const int64_t images = x.size(0), channels = x.size(1), height = x.size(2), width = x.size(3);
  const auto float_geometry = [&](Method method) {
    Geometry geometry = make_geometry(images, channels, height, width, blocks, method, worker_limit());
    pack_by_bundles(geometry, worker_limit());
    return geometry;
  };
  const bool bfloat16 = is_bfloat16(x);
  Method method = preferred_method(images, height, width);
  if (const StagePairKernels* pairs = bfloat16 ? pair_kernels(method) : nullptr) {
    job.geometry = make_pair_geometry(images, channels, height, width, blocks, pairs->tile, worker_limit());
    if constexpr (std::is_same_v<Job, StageForward>)
      job.geometry.bordered = !job.saved.data && job.geometry.can_be_bordered();
    if (run_with_maps(job, parameters, lay_out, pairs->kernels.*run)) return;
    method = Method::kDirect;
  }
  job.round_operands = bfloat16;
  job.geometry = float_geometry(method);
  if (run_with_maps(job, parameters, lay_out, float_kernels().*run) || method == Method::kDirect) return;
  job.geometry = float_geometry(Method::kDirect);
  run_with_maps(job, parameters, lay_out, float_kernels().*run);
}

std::tuple<Tensor, Tensor, Tensor> residual_stage(const Tensor& x, const Tensor& v, const Tensor& g,
                                                  const Tensor& bias, double skip_scale, int64_t recompute,
                                                  bool save) {
  const Parameters parameters = checked_parameters(x, v, g, bias, recompute);
  const int64_t blocks = v.size(0);
  const SavedShape saved(x, blocks, recompute);
  Tensor y = empty_map_like(x);
  Tensor norm = empty_of({blocks, 2, x.size(1)}, ScalarType::Float);
  Tensor maps = save ? recycled_empty({saved.sizes, 6}, saved.dtype) : empty_of({0}, saved.dtype);

  StageForward job{};
  job.x = external_map(x);
  job.y = external_map(y);
  job.v = parameter(parameters.v);
  job.g = parameter(parameters.g);
  job.bias = parameter(parameters.bias);
  job.skip_scale = static_cast<float>(skip_scale);
  job.norm = static_cast<float*>(norm.mutable_data_ptr());
  job.saved = {save ? maps.mutable_data_ptr() : nullptr, is_bfloat16(maps), recompute, false};
  run_stage(x, blocks, job, false, lay_out_forward, &StageKernels::forward);
  return {y, norm, maps};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> residual_stage_backward(
    const Tensor& dy, const Tensor& v, const Tensor& g, const Tensor& bias, const Tensor& norm, const Tensor& maps,
    double skip_scale, int64_t recompute, bool parameter_gradients) {
  const Parameters parameters = checked_parameters(dy, v, g, bias, recompute);
  const int64_t blocks = v.size(0);
  stage::check_saved(norm, maps, g, SavedShape(dy, blocks, recompute));
  Tensor dx = empty_map_like(dy);
  const bool wanted = parameter_gradients;
  Tensor dv = wanted ? recycled_empty(v.sizes(), v.scalar_type()) : empty_of({0}, v.scalar_type());
  Tensor dg = wanted ? torch::stable::empty(g.sizes(), g.scalar_type()) : empty_of({0}, g.scalar_type());
  Tensor dbias = wanted ? torch::stable::empty(bias.sizes(), bias.scalar_type()) : empty_of({0}, bias.scalar_type());

  StageBackward job{};
  job.dy = external_map(dy);
  job.dx = external_map(dx);
  job.v = parameter(parameters.v);
  job.g = parameter(parameters.g);
  job.bias = parameter(parameters.bias);
  job.dv = parameter(dv);
  job.dg = parameter(dg);
  job.dbias = parameter(dbias);
  job.dv.past_caches = dv.numel() >= kFarWeights;
  job.parameters = wanted;
  job.skip_scale = static_cast<float>(skip_scale);
  job.norm = static_cast<const float*>(norm.const_data_ptr());
  job.saved = {memory_of_input(maps), is_bfloat16(maps), recompute, false};
  run_stage(dy, blocks, job, wanted, lay_out_backward, &StageKernels::backward);
  return {dx, dv, dg, dbias};
}

}  // namespace
}  // namespace wnfused::cpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CPU, m) {
  m.impl("residual_stage", TORCH_BOX(&wnfused::cpu::residual_stage));
  m.impl("residual_stage_backward", TORCH_BOX(&wnfused::cpu::residual_stage_backward));
}

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CompositeExplicitAutograd, m) {
  m.impl("cpu_stage_method", TORCH_BOX(&wnfused::cpu::cpu_stage_method));
}

// The ops residual_stage and residual_stage_backward on CUDA tensors: checks, outputs, and a workspace from torch's
// allocator, which lives until the call returns and whose memory the allocator reuses in the order of the stream.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <tuple>

#include "cuda/stage_driver.h"
#include "cuda/torch.h"
#include "stage_arguments.h"

namespace wnfused::gpu {
namespace {

using stage::is_bfloat16;

Values values_of(const Tensor& tensor) { return {tensor.mutable_data_ptr(), is_bfloat16(tensor)}; }

ExternalMap map_of(const Tensor& x) { return {values_of(x), x.stride(0), x.stride(1), x.stride(2), x.stride(3)}; }

Precision precision_of(const Tensor& x, bool tf32) {
  return is_bfloat16(x) ? Precision::kBfloat16 : tf32 ? Precision::kTf32 : Precision::kFloat32;
}

int attribute_of(int device, cudaDeviceAttr attribute) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

int64_t shared_limit(int device) { return attribute_of(device, cudaDevAttrMaxSharedMemoryPerBlockOptin); }

// Whether the stages that stage_sm90a.cu has run by it, on devices of that architecture.
std::atomic<bool> warpgroup_stage{false};

int architecture_of(int device) {
  return 10 * attribute_of(device, cudaDevAttrComputeCapabilityMajor) +
         attribute_of(device, cudaDevAttrComputeCapabilityMinor);
}

// Kernels count images, convolutions and their pieces in 32 bits.
constexpr int64_t kMaxCount = int64_t{1} << 24;

const StageEntry& entry_for(const Tensor& x, int64_t blocks, bool tf32) {
  const int device = x.get_device_index();
  const int64_t limit = shared_limit(device);
  const auto find = [&](const StageEntry* table) {
    return table ? find_entry(table, x.size(1), x.size(2), x.size(3), limit) : nullptr;
  };
  const Precision precision = precision_of(x, tf32);
  const int architecture = architecture_of(device);
  const StageEntry* entry = nullptr;
  if (warpgroup_stage && architecture == 90) entry = find(warpgroup_stage_table(precision));
  if (!entry && architecture >= 90) entry = find(large_stage_table(precision));
  if (!entry) entry = find(stage_table(precision));
  STD_TORCH_CHECK(entry, "residual_stage: no CUDA kernel for ", x.size(1), " channels on ", x.size(2), " x ", x.size(3),
                  " maps on this device");
  STD_TORCH_CHECK(x.size(0) < kMaxCount && blocks < kMaxCount, "residual_stage: more than ", kMaxCount,
                  " images or blocks");
  return *entry;
}

StageProblem problem_of(const Tensor& x, const stage::Parameters& parameters, double skip_scale, int64_t recompute) {
  const int64_t blocks = parameters.v.size(0);
  // More than all blocks is all of them; the kernels count in 32 bits.
  const int64_t every = recompute > blocks ? std::max<int64_t>(blocks, 1) : recompute;
  return {x.size(0), blocks, static_cast<float>(skip_scale), every,
          values_of(parameters.v), values_of(parameters.g), values_of(parameters.bias)};
}

template <class Call>
void run(const StageEntry& entry, const Call& call, const Tensor& x, cudaStream_t queue) {
  Tensor workspace = empty_like_on(x, {workspace_bytes(entry, call)}, ScalarType::Byte);
  check(enqueue(entry, call, static_cast<char*>(workspace.mutable_data_ptr()), queue));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> residual_stage(const Tensor& x, const Tensor& v, const Tensor& g,
                                                  const Tensor& bias, double skip_scale, int64_t recompute, bool save,
                                                  bool tf32) {
  check_devices("residual_stage", {&x, &v, &g, &bias});
  const OnDevice here(x);
  const stage::Parameters parameters = stage::checked_parameters(x, v, g, bias, recompute);
  const StageEntry& entry = entry_for(x, v.size(0), tf32);
  const stage::SavedShape saved(x, v.size(0), recompute);
  Tensor y = stage::empty_map_like(x);
  Tensor norm = empty_like_on(x, {v.size(0), 2, x.size(1)}, ScalarType::Float);
  Tensor maps = save ? torch::stable::new_empty(x, {saved.sizes, 6}, saved.dtype) : empty_like_on(x, {0}, saved.dtype);

  const bool has_signs = save && recompute == 0;
  Tensor signs = empty_like_on(x, {has_signs ? sign_bytes(entry, x.size(0), v.size(0)) : 0}, ScalarType::Byte);

  const StageForwardCall call{problem_of(x, parameters, skip_scale, recompute), map_of(x), map_of(y),
                              static_cast<float*>(norm.mutable_data_ptr()), save ? maps.mutable_data_ptr() : nullptr,
                              has_signs ? static_cast<uint8_t*>(signs.mutable_data_ptr()) : nullptr};
  run(entry, call, x, here.queue);
  return {y, norm, maps, signs};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> residual_stage_backward(
    const Tensor& dy, const Tensor& v, const Tensor& g, const Tensor& bias, const Tensor& norm, const Tensor& maps,
    const Tensor& signs, double skip_scale, int64_t recompute, bool parameter_gradients, bool tf32) {
  check_devices("residual_stage_backward", {&dy, &v, &g, &bias, &norm, &maps, &signs});
  const OnDevice here(dy);
  const stage::Parameters parameters = stage::checked_parameters(dy, v, g, bias, recompute);
  stage::check_saved(norm, maps, g, stage::SavedShape(dy, v.size(0), recompute));
  const StageEntry& entry = entry_for(dy, v.size(0), tf32);
  STD_TORCH_CHECK(recompute > 0 || (signs.scalar_type() == ScalarType::Byte && signs.is_contiguous() &&
                                    signs.numel() == sign_bytes(entry, dy.size(0), v.size(0))),
                  "residual_stage_backward: signs must be the forward's");
  const auto gradient_of = [&](const Tensor& tensor) {
    return parameter_gradients ? torch::stable::new_empty(tensor, tensor.sizes())
                               : empty_like_on(tensor, {0}, tensor.scalar_type());
  };
  Tensor dx = stage::empty_map_like(dy), dv = gradient_of(v), dg = gradient_of(g), dbias = gradient_of(bias);
  // Kernels copy up to 16 bytes at once. Memory of torch's is aligned; what a hook unpacks out of a larger buffer may
  // not be.
  const auto aligned = [](const Tensor& tensor) {
    return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0 ? tensor : torch::stable::clone(tensor);
  };
  const Tensor saved = aligned(maps), saved_signs = aligned(signs);

  StageBackwardCall call{problem_of(dy, parameters, skip_scale, recompute), map_of(dy), map_of(dx),
                         static_cast<const float*>(norm.const_data_ptr()), saved.const_data_ptr(),
                         static_cast<const uint8_t*>(saved_signs.const_data_ptr()), parameter_gradients,
                         values_of(dv), values_of(dg), values_of(dbias)};
  run(entry, call, dy, here.queue);
  return {dx, dv, dg, dbias};
}

// Which maps the stage's kernels run on a device: precision 0 bfloat16, 1 tf32, 2 float32 -> "16x32x32 32x16x16 ...".
std::string stage_shapes(int64_t precision, int64_t device) {
  const int64_t limit = shared_limit(static_cast<int>(device));
  std::string shapes;
  for (const StageEntry* entry = stage_table(static_cast<Precision>(precision)); entry->name; ++entry)
    if (entry->shared_bytes <= limit)
      shapes += (shapes.empty() ? "" : " ") + std::to_string(entry->channels) + "x" + std::to_string(entry->height) +
                "x" + std::to_string(entry->width);
  return shapes;
}

// Of the stages by wgmma, on the current device: the fewest that run at once.
int64_t warpgroup_clusters() {
  int fewest = 0;
  for (const Precision precision : {Precision::kBfloat16, Precision::kTf32})
    for (const StageEntry* entry = warpgroup_stage_table(precision); entry->name; ++entry) {
      int count = 0;
      check(entry->clusters(&count));
      fewest = fewest == 0 ? count : std::min(fewest, count);
    }
  return fewest;
}

void set_warpgroup_stage(bool on) { warpgroup_stage = on; }

int64_t toolkit_version() { return CUDART_VERSION; }

// Of those that this file is compiled for. x_sm90a.cu and x_from90.cu are compiled for some of them.
int64_t newest_architecture() { return std::max({__CUDA_ARCH_LIST__}) / 10; }

int64_t driver_version() {
  int version = 0;
  check(cudaDriverGetVersion(&version));
  return version;
}

}  // namespace
}  // namespace wnfused::gpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CUDA, m) {
  m.impl("cuda_residual_stage", TORCH_BOX(&wnfused::gpu::residual_stage));
  m.impl("cuda_residual_stage_backward", TORCH_BOX(&wnfused::gpu::residual_stage_backward));
}

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CompositeExplicitAutograd, m) {
  m.impl("cuda_stage_shapes", TORCH_BOX(&wnfused::gpu::stage_shapes));
  m.impl("cuda_warpgroup_clusters", TORCH_BOX(&wnfused::gpu::warpgroup_clusters));
  m.impl("set_cuda_warpgroup_stage", TORCH_BOX(&wnfused::gpu::set_warpgroup_stage));
  m.impl("cuda_toolkit_version", TORCH_BOX(&wnfused::gpu::toolkit_version));
  m.impl("cuda_newest_architecture", TORCH_BOX(&wnfused::gpu::newest_architecture));
  m.impl("cuda_driver_version", TORCH_BOX(&wnfused::gpu::driver_version));
}

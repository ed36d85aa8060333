// What every op on CUDA tensors needs of torch: the device made current, its current stream, and launches checked.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>

namespace wnfused::gpu {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// While it lives, the device of `tensor` is current, and `queue` its current stream.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    queue = static_cast<cudaStream_t>(stream);
  }

  cudaStream_t queue;

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};

inline void check(cudaError_t status) { STD_CUDA_CHECK(status); }

// All tensors on the first one's device.
inline void check_devices(const char* op, std::initializer_list<const Tensor*> tensors) {
  const Tensor& first = **tensors.begin();
  for (const Tensor* tensor : tensors)
    STD_TORCH_CHECK(tensor->is_cuda() && tensor->get_device_index() == first.get_device_index(), op,
                    ": all tensors must be on one CUDA device");
}

inline Tensor empty_like_on(const Tensor& device, std::initializer_list<int64_t> sizes, ScalarType dtype) {
  return torch::stable::new_empty(device, {sizes.begin(), sizes.size()}, dtype);
}

}  // namespace wnfused::gpu

// See kernels.h.
#include "cuda/small_linear_backward.h"
#include "cuda/small_linear_forward.h"
#include "emulation/kernels.h"

namespace wnfused::gpu::emulated {

template <class Product, class T, class N>
Status small_linear(const SmallLinearParams<T, N>& params, Queue queue) {
  return enqueue_small_linear<Product>(params, queue);
}

template <class Product, class T, class N>
Status small_linear_backward(const SmallLinearParams<T, N>& params, Queue queue) {
  return enqueue_small_linear_backward<Product>(params, queue);
}

#define WNFUSED_SMALL_LINEAR(Product, T, N)                                          \
  template Status small_linear<Product>(const SmallLinearParams<T, N>&, Queue queue); \
  template Status small_linear_backward<Product>(const SmallLinearParams<T, N>&, Queue queue);
WNFUSED_SMALL_LINEAR(Tf32, float, float)
WNFUSED_SMALL_LINEAR(Float32, float, float)
WNFUSED_SMALL_LINEAR(Bfloat16, BFloat, BFloat)
WNFUSED_SMALL_LINEAR(Bfloat16, float, BFloat)

}  // namespace wnfused::gpu::emulated

// See kernels.h.
#include "emulation/kernels.h"

namespace wnfused::gpu::emulated {

template <bool kBackward, class T, class N>
Status layer_weight(const LayerWeightParams<T, N>& params, Queue queue) {
  return enqueue_layer_weight<kBackward>(params, queue);
}

template <class N>
Status layer_epilogue(const LayerEpilogueParams<N>& params, Queue queue) {
  return enqueue_layer_epilogue(params, queue);
}

template <class N>
Status layer_mask(const LayerMaskParams<N>& params, Queue queue) {
  return enqueue_layer_mask(params, queue);
}

template <class N>
int64_t mask_shares(const LayerMaskParams<N>& params) {
  return layer_mask_shares(params);
}

#define WNFUSED_WEIGHT(T, N)                                                         \
  template Status layer_weight<false>(const LayerWeightParams<T, N>&, Queue queue); \
  template Status layer_weight<true>(const LayerWeightParams<T, N>&, Queue queue);
WNFUSED_WEIGHT(float, float)
WNFUSED_WEIGHT(float, BFloat)
WNFUSED_WEIGHT(BFloat, BFloat)

#define WNFUSED_MAPS(N)                                                    \
  template Status layer_epilogue(const LayerEpilogueParams<N>&, Queue);    \
  template Status layer_mask(const LayerMaskParams<N>&, Queue);            \
  template int64_t mask_shares(const LayerMaskParams<N>&);
WNFUSED_MAPS(float)
WNFUSED_MAPS(BFloat)

}  // namespace wnfused::gpu::emulated

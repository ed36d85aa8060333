// Ops by their names, as C++ calls them: typed, past torch's Python wrappers.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace wnfused {

template <class Signature>
c10::TypedOperatorHandle<Signature> op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Those of the kinds of layers: what runs one forward and backward, what records it, and what gives the gradients that
// are more than a call of its kernels.
struct LinearNames {
  static constexpr const char* kForward = "wnfused_native::linear";
  static constexpr const char* kBackward = "wnfused_native::linear_backward";
  static constexpr const char* kRecorded = "wnfused_autograd::linear";
  static constexpr const char* kGeneral = "wnfused_autograd::linear_gradients";
};
// Of another norm than that of rows.
struct LinearOfNormNames {
  static constexpr const char* kForward = "wnfused_autograd::composed_linear";
  static constexpr const char* kBackward = "wnfused_autograd::composed_linear_backward";
  static constexpr const char* kRecorded = "wnfused_autograd::linear_of_norm";
  static constexpr const char* kGeneral = "wnfused_autograd::linear_of_norm_gradients";
};
struct ConvNames {
  static constexpr const char* kForward = "wnfused_native::conv";
  static constexpr const char* kBackward = "wnfused_native::conv_backward";
  static constexpr const char* kRecorded = "wnfused_autograd::conv";
  static constexpr const char* kGeneral = "wnfused_autograd::conv_gradients";
};
struct ConvTransposeNames {
  static constexpr const char* kForward = "wnfused_native::conv_transpose";
  static constexpr const char* kBackward = "wnfused_native::conv_transpose_backward";
  static constexpr const char* kRecorded = "wnfused_autograd::conv_transpose";
  static constexpr const char* kGeneral = "wnfused_autograd::conv_transpose_gradients";
};
struct StageNames {
  static constexpr const char* kForward = "wnfused_native::residual_stage";
  static constexpr const char* kBackward = "wnfused_native::residual_stage_backward";
  static constexpr const char* kRecorded = "wnfused_autograd::residual_stage";
  static constexpr const char* kGeneral = "wnfused_autograd::residual_stage_gradients";
};

}  // namespace wnfused

// An op by its name, as C++ calls it: typed, past torch's Python wrappers.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace wnfused {

template <class Signature>
c10::TypedOperatorHandle<Signature> op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace wnfused

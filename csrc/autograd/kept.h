// The constants of a layer, strides and an activation say, between the passes of its node.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <tuple>
#include <utility>
#include <vector>

namespace wnfused {

// A tuple in the place of a list, which compiled autograd could not hash.
template <class T>
struct Kept {
  using Type = T;
  static c10::IValue of(T constant) { return constant; }
  static T from(const c10::IValue& kept) { return kept.to<T>(); }
};
template <>
struct Kept<at::IntArrayRef> {
  using Type = std::vector<int64_t>;
  static c10::IValue of(at::IntArrayRef constant) {
    return c10::ivalue::Tuple::create(std::vector<c10::IValue>(constant.begin(), constant.end()));
  }
  static Type from(const c10::IValue& kept) {
    Type constant;
    for (const c10::IValue& extent : kept.toTupleRef().elements()) constant.push_back(extent.toInt());
    return constant;
  }
};

template <class... Constants>
c10::IValue keep(Constants... constants) {
  return c10::ivalue::Tuple::create({Kept<Constants>::of(constants)...});
}

template <class... Constants>
std::tuple<typename Kept<Constants>::Type...> constants_of(const c10::IValue& kept) {
  const auto& elements = kept.toTupleRef().elements();
  return [&]<size_t... I>(std::index_sequence<I...>) {
    return std::tuple<typename Kept<Constants>::Type...>{Kept<Constants>::from(elements[I])...};
  }(std::index_sequence_for<Constants...>());
}

// The last two of a layer's constants, a tuple of them.
template <class Constants>
auto& activation_of(Constants& constants) {
  return std::get<std::tuple_size_v<Constants> - 2>(constants);
}
template <class Constants>
double slope_of(const Constants& constants) {
  return std::get<std::tuple_size_v<Constants> - 1>(constants);
}

}  // namespace wnfused

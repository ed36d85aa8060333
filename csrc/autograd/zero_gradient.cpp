#include "autograd/zero_gradient.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <set>
#include <utility>

namespace wnfused {
namespace {

using at::Tensor;
using torch::autograd::Node;

// Of the backward that ran last in a thread; the nodes of the CPU all run in the one that began it. Zeros of an earlier
// backward may still be held by somebody: they are never used again.
struct Zeros {
  int backward = -1;
  Tensor number;
  std::set<std::pair<const Node*, uint32_t>> on_their_way;  // by whom they are for, and as which of its gradients
};
thread_local Zeros zeros;

}  // namespace

Tensor zero_gradient(size_t edge, const Tensor& like) {
  const int backward = torch::autograd::get_current_graph_task_id();
  if (zeros.backward != backward) zeros = {backward, at::zeros({}, at::kFloat), {}};
  const auto node = torch::autograd::get_current_node();
  if (!node) return at::zeros_like(like);  // a graph that was captured runs without its nodes
  const auto& next = node->next_edge(edge);
  const Node* receiver = next.function.get();
  if (!receiver || !zeros.on_their_way.emplace(receiver, next.input_nr).second) return {};
  const bool is_leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(receiver) != nullptr;
  // Of one entry the one number would be no more guarded from writing in place than any tensor.
  return is_leaf || like.numel() < 2 ? at::zeros_like(like) : zeros.number.expand(like.sizes());
}

bool is_zero_gradient(const Tensor& dy) {
  return zeros.number.defined() && dy.is_cpu() && dy.has_storage() &&
         dy.storage().is_alias_of(zeros.number.storage()) &&
         zeros.backward == torch::autograd::get_current_graph_task_id();
}

bool may_be_zero_gradient_of_python(const Tensor& dy) {
  if (dy.numel() < 2 || !dy.is_cpu() || dy.layout() != at::kStrided || !dy.has_storage()) return false;
  for (const int64_t stride : dy.strides()) {
    if (stride != 0) return false;
  }
  const auto* bytes = static_cast<const char*>(dy.const_data_ptr());
  for (int64_t i = 0; bytes && i < dy.element_size(); ++i) {
    if (bytes[i] != 0) return false;
  }
  return bytes != nullptr;
}

}  // namespace wnfused

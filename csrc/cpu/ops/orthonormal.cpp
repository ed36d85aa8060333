// Orthonormal rows of a batch of matrices, shared out among the threads one by one.
#include "cpu/orthonormal/orthonormal.h"

#include <torch/csrc/stable/library.h>

#include <vector>

#include "cpu/layer/tensor.h"
#include "cpu/machine/isa.h"
#include "cpu/machine/parallel.h"
#include "ops.h"

namespace wnfused {
namespace {

cpu::Orthonormalise orthonormalise() {
  switch (cpu::active_isa()) {
#if defined(__x86_64__)
    case cpu::Isa::kAvx512:
      return cpu::avx512::orthonormalise;
    case cpu::Isa::kAvx2:
      return cpu::avx2::orthonormalise;
#endif
    default:
      return cpu::portable::orthonormalise;
  }
}

}  // namespace

Tensor orthonormal_rows_(Tensor a) {
  STD_TORCH_CHECK(a.dim() == 3 && a.is_contiguous(), "orthonormal_rows_: expects a contiguous [n, r, c]");
  STD_TORCH_CHECK(a.scalar_type() == torch::headeronly::ScalarType::Float, "orthonormal_rows_: expects float32");
  const int64_t count = a.size(0), rows = a.size(1), columns = a.size(2);
  STD_TORCH_CHECK(rows >= 1 && rows <= columns && rows <= cpu::kMaxOrthonormalRows,
                  "orthonormal_rows_: cannot take ", rows, " rows of ", columns);
  const cpu::OrthonormalShape shape(rows, columns);
  const cpu::Orthonormalise run = orthonormalise();
  Tensor solved = cpu::empty({count}, torch::headeronly::ScalarType::Bool);
  float* matrices = static_cast<float*>(a.mutable_data_ptr());
  bool* flags = static_cast<bool*>(solved.mutable_data_ptr());
  cpu::for_rows(0, count, rows * rows * columns, [&](int64_t begin, int64_t end) {
    std::vector<float> workspace(shape.workspace());
    for (int64_t i = begin; i < end; ++i) flags[i] = run(shape, matrices + i * rows * columns, workspace.data());
  });
  return solved;
}

}  // namespace wnfused

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CPU, library) {
  library.impl("orthonormal_rows_", TORCH_BOX(&wnfused::orthonormal_rows_));
}

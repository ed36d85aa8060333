// Run-time choice of the instruction set, and the ops that show and force it:
//   cpu_isa() -> str             the active one
//   cpu_isas() -> str            those this processor can run, best first, comma-separated
//   set_cpu_isa(str name) -> ()  "auto", or one of cpu_isas()
#include "isa.h"

#include <torch/csrc/stable/library.h>

#include <atomic>

namespace wnfused::cpu {
namespace {

constexpr Isa kBestFirst[] = {Isa::kAvx512, Isa::kAvx2, Isa::kPortable};

bool usable(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("fma");
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    case Isa::kPortable:
      return true;
    default:
      return false;
  }
}

Isa best() {
  for (Isa isa : kBestFirst)
    if (usable(isa)) return isa;
  return Isa::kPortable;
}

std::atomic<Isa>& active() {
  static std::atomic<Isa> isa{best()};
  return isa;
}

std::string usable_names() {
  std::string names;
  for (Isa isa : kBestFirst) {
    if (!usable(isa)) continue;
    if (!names.empty()) names += ",";
    names += isa_name(isa);
  }
  return names;
}

std::string cpu_isa() { return isa_name(active_isa()); }

void set_cpu_isa(std::string name) {
  if (name == "auto") {
    active().store(best());
    return;
  }
  for (Isa isa : kBestFirst) {
    if (name == isa_name(isa) && usable(isa)) {
      active().store(isa);
      return;
    }
  }
  STD_TORCH_CHECK(false, "set_cpu_isa: '", name, "' is not available here; choose auto or one of ", usable_names());
}

}  // namespace

Isa active_isa() { return active().load(std::memory_order_relaxed); }

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    default:
      return "portable";
  }
}

}  // namespace wnfused::cpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&wnfused::cpu::cpu_isa));
  m.impl("cpu_isas", TORCH_BOX(&wnfused::cpu::usable_names));
  m.impl("set_cpu_isa", TORCH_BOX(&wnfused::cpu::set_cpu_isa));
}

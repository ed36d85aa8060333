// Run-time choice of the instruction set, and the ops that show and force it:
//   cpu_isa() -> str             the active one
//   cpu_isas() -> str            those this processor can run, best first, comma-separated
//   set_cpu_isa(str name) -> ()  "auto", or one of cpu_isas()
#include "cpu/machine/isa.h"

#include <torch/csrc/stable/library.h>

#include <atomic>
#include <string>

#include "cpu/machine/amx.h"

namespace wnfused::cpu {
namespace {

bool has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
#else
  return false;
#endif
}

bool has_avx512() {
#if defined(__x86_64__)
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

bool has_avx512_bf16() {
#if defined(__x86_64__)
  return has_avx512() && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

bool has_amx() {
  static const bool usable = has_avx512_bf16() && amx_usable();
  return usable;
}

bool always() { return true; }

struct Choice {
  const char* name;
  Isa isa;
  PairProducts products;
  bool (*usable)();
};

constexpr Choice kBestFirst[] = {
    {"amx", Isa::kAvx512, PairProducts::kTiles, has_amx},
    {"avx512_bf16", Isa::kAvx512, PairProducts::kDots, has_avx512_bf16},
    {"avx512", Isa::kAvx512, PairProducts::kNone, has_avx512},
    {"avx2", Isa::kAvx2, PairProducts::kNone, has_avx2},
    {"portable", Isa::kPortable, PairProducts::kNone, always},
    {"amx-emulated", Isa::kPortable, PairProducts::kEmulatedTiles, always},
};

const Choice* best() {
  for (const Choice& choice : kBestFirst)
    if (choice.usable()) return &choice;
  return nullptr;
}

std::atomic<const Choice*>& active() {
  static std::atomic<const Choice*> choice{best()};
  return choice;
}

std::string usable_names() {
  std::string names;
  for (const Choice& choice : kBestFirst) {
    if (!choice.usable()) continue;
    if (!names.empty()) names += ",";
    names += choice.name;
  }
  return names;
}

std::string cpu_isa() { return active().load()->name; }

void set_cpu_isa(std::string name) {
  if (name == "auto") {
    active().store(best());
    return;
  }
  for (const Choice& choice : kBestFirst) {
    if (name == choice.name && choice.usable()) {
      active().store(&choice);
      return;
    }
  }
  STD_TORCH_CHECK(false, "set_cpu_isa: '", name, "' is not available here; choose auto or one of ", usable_names());
}

}  // namespace

Isa active_isa() { return active().load(std::memory_order_relaxed)->isa; }

PairProducts active_pair_products() { return active().load(std::memory_order_relaxed)->products; }

bool has_tiles() {
  const PairProducts products = active_pair_products();
  return products == PairProducts::kTiles || products == PairProducts::kEmulatedTiles;
}

}  // namespace wnfused::cpu

STABLE_TORCH_LIBRARY_IMPL(wnfused_native, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&wnfused::cpu::cpu_isa));
  m.impl("cpu_isas", TORCH_BOX(&wnfused::cpu::usable_names));
  m.impl("set_cpu_isa", TORCH_BOX(&wnfused::cpu::set_cpu_isa));
}

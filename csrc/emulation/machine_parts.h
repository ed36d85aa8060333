// What the machine keeps of a lane, a warp, a block's shared memory and a barrier with phases.
#pragma once

#include <ucontext.h>

#include <csetjmp>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "emulation/machine.h"

namespace wnfused::gpu::emulation {

constexpr std::size_t kStackBytes = 64 * 1024;

// How findings name a cell.
inline std::string byte(std::size_t cell) { return " byte " + std::to_string(cell * kCell); }

// What a warp waits for.
constexpr const char* kBarrier = "the block's barrier";
constexpr const char* kClusterBarrier = "the cluster's barrier";
constexpr const char* kPhase = "a wait for a phase";
constexpr const char* kEnd = "the end";

struct Machine::Fiber {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  ucontext_t context;
  std::jmp_buf state;
  bool started = false;
  const char* waits_at = nullptr;  // the instruction this lane arrived at
  void* operands = nullptr;
  std::vector<Copy> open;
  std::vector<std::vector<Copy>> groups;
};

struct Machine::Warp {
  struct Product {
    std::vector<std::size_t> rows;
    std::function<void()> work;
  };

  const char* waits = nullptr;  // for whom: a barrier, a phase, nobody any more; null where it can go on
  std::size_t phase = 0;        // which one
  int parity = 0;
  bool begun = false;  // whether sums were fenced since products were waited for
  std::vector<Product> open;
  std::deque<std::vector<Product>> groups;
};

struct Machine::Phase {
  struct Copy {
    std::size_t offset;
    const char* global;
    std::size_t bytes;
  };

  int arrivals, missing;
  int creator;
  int32_t created;  // the cluster's epoch
  int number = 0;
  int64_t expected = 0;  // bytes
  std::vector<Copy> copies = {};

  int64_t under_way() const {
    int64_t bytes = 0;
    for (const Copy& copy : copies) bytes += static_cast<int64_t>(copy.bytes);
    return bytes;
  }
  void begin_next() {
    ++number;
    missing = arrivals;
    expected = 0;
    copies.clear();
  }
};

struct Machine::Space {
  std::vector<char> allocation;
  char* memory = nullptr;
  std::vector<Cell> cells;
  int32_t epoch = 0;  // barriers so far
  std::map<std::size_t, Phase> phases;
};

}  // namespace wnfused::gpu::emulation

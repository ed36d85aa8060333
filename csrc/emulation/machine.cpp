#include "emulation/machine.h"

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

// jmp_buf switches between stacks that makecontext set up: a tenth of swapcontext's cost, which enters the kernel.
namespace wnfused::gpu::emulation {
namespace {

constexpr std::size_t kStackBytes = 64 * 1024;
constexpr std::size_t kMaxFindings = 8;
constexpr int kPoison = 0xff;  // a NaN in every format

Machine* machine = nullptr;

std::string byte(std::size_t cell) { return " byte " + std::to_string(cell * kCell); }

}  // namespace

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

Machine::Machine(int threads, std::size_t shared_bytes, WarpOrder order)
    : threads_(threads), warps_(threads / kLanes), shared_bytes_(shared_bytes), order_(order), fibers_(threads),
      allocation_(shared_bytes + 128), cells_(shared_bytes / kCell) {
  const auto base = reinterpret_cast<std::uintptr_t>(allocation_.data());
  shared_ = allocation_.data() + (128 - base % 128) % 128;
}

Machine::~Machine() = default;

Machine& Machine::current() { return *machine; }

bool Machine::run(int block, const std::function<void(char*)>& body) {
  machine = this;
  block_ = block;
  body_ = &body;
  epoch_ = 0;
  std::memset(shared_, kPoison, shared_bytes_);
  std::fill(cells_.begin(), cells_.end(), Cell{});
  for (Fiber& fiber : fibers_) {
    fiber.started = false;
    fiber.waits_at = nullptr;
    fiber.open.clear();
    fiber.groups.clear();
  }
  const int outcome = _setjmp(home_);
  if (outcome == 0) resume(order_ == WarpOrder::kForward ? 0 : (warps_ - 1) * kLanes);
  return outcome == 1;
}

void Machine::resume(int thread) {
  thread_ = thread;
  Fiber& fiber = fibers_[thread];
  if (fiber.started) _longjmp(fiber.state, 1);
  fiber.started = true;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, &Machine::enter, 0);
  setcontext(&fiber.context);
}

void Machine::enter() {
  (*machine->body_)(machine->shared_);
  machine->finish();
}

// Hands over to the next lane; returns when this lane is resumed. Lanes of a warp take turns in order, so that each
// finds its predecessors waiting at the same place.
void Machine::arrive(const char* name) {
  Fiber& fiber = fibers_[thread_];
  fiber.waits_at = name;
  const int lane = thread_ % kLanes;
  if (lane > 0 && fibers_[thread_ - 1].waits_at != name)
    give_up(std::string("lane ") + std::to_string(lane) + " is at " + name + ", the lane before it at " +
            fibers_[thread_ - 1].waits_at);
  if (lane < kLanes - 1 && _setjmp(fiber.state) == 0) resume(thread_ + 1);
}

void Machine::collective(const char* name, void* operands, void (*work)(void* const*)) {
  const int self = thread_;
  fibers_[self].operands = operands;
  arrive(name);
  if (self % kLanes != kLanes - 1) return;
  std::array<void*, kLanes> all;
  for (int lane = 0; lane < kLanes; ++lane) all[lane] = fibers_[self - kLanes + 1 + lane].operands;
  work(all.data());
  if (_setjmp(fibers_[self].state) == 0) resume(self - kLanes + 1);
}

namespace {
constexpr const char* kBarrier = "the block's barrier";
constexpr const char* kEnd = "the end";
}  // namespace

void Machine::barrier() {
  const int self = thread_;
  arrive(kBarrier);
  if (self % kLanes != kLanes - 1) return;
  const int warp = self / kLanes;
  const int first = order_ == WarpOrder::kForward ? 0 : warps_ - 1, last = warps_ - 1 - first;
  int next = warp == last ? first : warp + (last > first ? 1 : -1);
  if (warp == last) {
    for (int thread = kLanes - 1; thread < threads_; thread += kLanes)
      if (fibers_[thread].waits_at != kBarrier) give_up("not every warp arrives at the block's barrier");
    for (Fiber& fiber : fibers_) fiber.waits_at = nullptr;
    ++epoch_;
  }
  if (_setjmp(fibers_[self].state) == 0) resume(next * kLanes);
}

void Machine::finish() {
  const int self = thread_;
  arrive(kEnd);  // returns in the last lane only; nothing resumes the others
  for (const Fiber& fiber : fibers_)
    if (fiber.waits_at == kBarrier) give_up("a warp ends while another waits at the block's barrier");
  const int warp = self / kLanes;
  const int first = order_ == WarpOrder::kForward ? 0 : warps_ - 1, last = warps_ - 1 - first;
  if (warp == last) {
    for (const Fiber& fiber : fibers_) {
      bool waiting = !fiber.open.empty();
      for (const auto& group : fiber.groups) waiting |= !group.empty();
      if (waiting) give_up("a thread ends before its copies have arrived");
    }
    _longjmp(home_, 1);
  }
  resume((warp + (last > first ? 1 : -1)) * kLanes);
}

void Machine::report(const std::string& finding) {
  if (findings_.size() < kMaxFindings)
    findings_.push_back("block " + std::to_string(block_) + ", thread " + std::to_string(thread_) + ": " + finding);
}

void Machine::give_up(const std::string& finding) {
  report(finding);
  _longjmp(home_, 2);
}

std::size_t Machine::locate(const char* address, std::size_t bytes) {
  const std::ptrdiff_t offset = address - shared_;
  if (offset < 0 || offset + bytes > shared_bytes_)
    give_up("an access outside shared memory, at byte " + std::to_string(offset));
  if (offset % bytes != 0) give_up("a misaligned access to shared memory, at byte " + std::to_string(offset));
  return offset / kCell;
}

void Machine::read_shared(const char* address, std::size_t bytes) {
  const std::size_t first = locate(address, bytes);
  for (std::size_t index = first; index < first + bytes / kCell; ++index) {
    Cell& cell = cells_[index];
    if (cell.under_way) report("reads" + byte(index) + " before its copy has been waited for");
    if (!cell.initialised) report("reads" + byte(index) + ", which nobody wrote");
    if (cell.written == epoch_ && cell.writer != thread_)
      report("reads" + byte(index) + ", which thread " + std::to_string(cell.writer) + " wrote since the last barrier");
    cell.reader = cell.read == epoch_ && cell.reader != thread_ ? kMany : static_cast<int16_t>(thread_);
    cell.read = epoch_;
  }
}

void Machine::touch_for_write(Cell& cell, std::size_t index) {
  const bool read_elsewhere = cell.read == epoch_ && cell.reader != thread_;
  const bool written_elsewhere = cell.written == epoch_ && cell.writer != thread_;
  if (read_elsewhere || written_elsewhere)
    report("writes" + byte(index) + ", which another thread " +
           (read_elsewhere ? "read" : "wrote") + " since the last barrier");
  cell.writer = static_cast<int16_t>(thread_);
  cell.written = epoch_;
}

void Machine::write_shared(const char* address, std::size_t bytes) {
  const std::size_t first = locate(address, bytes);
  for (std::size_t index = first; index < first + bytes / kCell; ++index) {
    if (cells_[index].under_way) report("writes" + byte(index) + " while a copy is under way");
    touch_for_write(cells_[index], index);
    cells_[index].initialised = true;
  }
}

void Machine::copy_async(char* shared, const void* global, bool valid) {
  const std::size_t first = locate(shared, 16);
  if (reinterpret_cast<std::uintptr_t>(global) % 16 != 0) give_up("a misaligned copy from global memory");
  for (std::size_t index = first; index < first + 16 / kCell; ++index) {
    if (cells_[index].under_way) report("starts a copy over one that is under way");
    touch_for_write(cells_[index], index);
    cells_[index].under_way = true;
  }
  Copy copy{shared, {}};
  if (valid) std::memcpy(copy.bytes, global, 16);
  fibers_[thread_].open.push_back(copy);
}

void Machine::commit_copies() {
  Fiber& fiber = fibers_[thread_];
  fiber.groups.push_back(std::move(fiber.open));
  fiber.open.clear();
}

void Machine::wait_copies(int pending) {
  auto& groups = fibers_[thread_].groups;
  while (static_cast<int>(groups.size()) > pending) {
    for (const Copy& copy : groups.front()) {
      std::memcpy(copy.shared, copy.bytes, 16);
      const std::size_t first = (copy.shared - shared_) / kCell;
      for (std::size_t index = first; index < first + 16 / kCell; ++index) {
        Cell& cell = cells_[index];
        cell.under_way = false;
        cell.initialised = true;
        cell.writer = static_cast<int16_t>(thread_);
        cell.written = epoch_;
      }
    }
    groups.erase(groups.begin());
  }
}

}  // namespace wnfused::gpu::emulation

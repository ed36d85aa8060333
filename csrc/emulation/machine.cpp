// Lanes take turns, warps in one order or the other; findings end up in a report.
#include "emulation/machine_parts.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

// jmp_buf switches between stacks that makecontext set up: a tenth of swapcontext's cost, which enters the kernel.
namespace wnfused::gpu::emulation {
namespace {

constexpr std::size_t kMaxFindings = 8;
constexpr int kPoison = 0xff;  // a NaN in every format

Machine* machine = nullptr;

}  // namespace

Machine::Machine(int threads, std::size_t shared_bytes, WarpOrder order, const std::vector<Array>& arrays, int blocks)
    : threads_(threads), warps_(threads / kLanes), blocks_(blocks), shared_bytes_(shared_bytes), order_(order),
      arrays_(arrays), fibers_(threads * blocks), all_warps_(warps_ * blocks), spaces_(blocks) {
  for (Space& space : spaces_) {
    space.allocation.resize(shared_bytes + 128);
    space.cells.resize(shared_bytes / kCell);
    const auto base = reinterpret_cast<std::uintptr_t>(space.allocation.data());
    space.memory = space.allocation.data() + (128 - base % 128) % 128;
  }
}

Machine::~Machine() = default;

Machine& Machine::current() { return *machine; }

bool Machine::run(int first, const std::function<void(char*)>& body) {
  machine = this;
  first_block_ = first;
  body_ = &body;
  cluster_epoch_ = 0;
  for (Space& space : spaces_) {
    space.epoch = 0;
    space.phases.clear();
    std::memset(space.memory, kPoison, shared_bytes_);
    std::fill(space.cells.begin(), space.cells.end(), Cell{});
  }
  for (Fiber& fiber : fibers_) {
    fiber.started = false;
    fiber.waits_at = nullptr;
    fiber.open.clear();
    fiber.groups.clear();
  }
  for (Warp& warp : all_warps_) warp = Warp{};
  const int outcome = _setjmp(home_);
  if (outcome == 0) resume(first_of(0, static_cast<int>(all_warps_.size())) * kLanes);
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
  (*machine->body_)(machine->spaces_[machine->rank()].memory);
  machine->finish();
}

// Hands over to the next lane; returns when this lane is resumed. Lanes of a warp take turns in order, so that each
// finds its predecessors waiting at the same place.
void Machine::take_turns(const char* name) {
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
  take_turns(name);
  if (self % kLanes != kLanes - 1) return;
  std::array<void*, kLanes> all;
  for (int lane = 0; lane < kLanes; ++lane) all[lane] = fibers_[self - kLanes + 1 + lane].operands;
  work(all.data());
  if (_setjmp(fibers_[self].state) == 0) resume(self - kLanes + 1);
}

// --------------------------------------------------------------------------------------------------- warps

// Of `count` warps from `warp` on, the one that goes first.
int Machine::first_of(int warp, int count) const { return order_ == WarpOrder::kForward ? warp : warp + count - 1; }

int Machine::after(int warp) const {
  const int count = static_cast<int>(all_warps_.size());
  return (warp + (order_ == WarpOrder::kForward ? 1 : count - 1)) % count;
}

bool Machine::ready(int warp) {
  const Warp& state = all_warps_[warp];
  return !state.waits || (state.waits == kPhase && phase_is_over(warp / warps_, state.phase, state.parity));
}

// From the last lane of a warp to the first lane of the next one that can go on, `warp` or one after it. Returns when
// this warp is resumed, whose first lane goes on first.
void Machine::hand_over(int warp) {
  const int self = thread_;
  for (std::size_t i = 0; i < all_warps_.size(); ++i, warp = after(warp))
    if (ready(warp)) {
      all_warps_[warp].waits = nullptr;
      if (_setjmp(fibers_[self].state) == 0) resume(warp * kLanes);
      return;
    }
  std::string where;
  for (const Warp& state : all_warps_) where += std::string(where.empty() ? "" : ", ") + state.waits;
  give_up("no warp can go on; they are at: " + where);
}

// Waits for the `count` warps from `first` on, in whose eyes an epoch ends then.
void Machine::wait_for_warps(const char* name, int first, int count) {
  const int self = thread_, warp = self / kLanes;
  take_turns(name);
  if (self % kLanes != kLanes - 1) return;
  all_warps_[warp].waits = name;
  const auto begin = all_warps_.begin() + first, end = begin + count;
  if (!std::all_of(begin, end, [name](const Warp& other) { return other.waits == name; }))
    return hand_over(after(warp));
  for (auto other = begin; other != end; ++other) other->waits = nullptr;
  for (int rank = first / warps_; rank < (first + count) / warps_; ++rank) ++spaces_[rank].epoch;
  if (name == kClusterBarrier) ++cluster_epoch_;
  hand_over(first_of(first, count));
}

void Machine::barrier() { wait_for_warps(kBarrier, rank() * warps_, warps_); }
void Machine::cluster_barrier() { wait_for_warps(kClusterBarrier, 0, warps_ * blocks_); }

void Machine::finish() {
  const int self = thread_;
  take_turns(kEnd);  // returns in the last lane only; nothing resumes the others
  Warp& warp = all_warps_[self / kLanes];
  warp.waits = kEnd;
  if (!warp.open.empty() || !warp.groups.empty()) give_up("a warp ends before its products are done");
  if (!std::all_of(all_warps_.begin(), all_warps_.end(), [](const Warp& other) { return other.waits == kEnd; }))
    hand_over(after(self / kLanes));
  for (const Fiber& fiber : fibers_) {
    bool waiting = !fiber.open.empty();
    for (const auto& group : fiber.groups) waiting |= !group.empty();
    if (waiting) give_up("a thread ends before its copies have arrived");
  }
  for (const Space& space : spaces_)
    for (const auto& [offset, phase] : space.phases)
      if (!phase.copies.empty()) give_up("a block ends before its copies have arrived");
  _longjmp(home_, 1);
}

void Machine::report(const std::string& finding) {
  if (findings_.size() < kMaxFindings)
    findings_.push_back("block " + std::to_string(block()) + ", thread " + std::to_string(thread()) + ": " + finding);
}

void Machine::give_up(const std::string& finding) {
  report(finding);
  _longjmp(home_, 2);
}

}  // namespace wnfused::gpu::emulation

#include "emulation/machine.h"

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <utility>

// jmp_buf switches between stacks that makecontext set up: a tenth of swapcontext's cost, which enters the kernel.
namespace wnfused::gpu::emulation {
namespace {

constexpr std::size_t kStackBytes = 64 * 1024;
constexpr std::size_t kMaxFindings = 8;
constexpr int kPoison = 0xff;  // a NaN in every format

Machine* machine = nullptr;

std::string byte(std::size_t cell) { return " byte " + std::to_string(cell * kCell); }

constexpr const char* kBarrier = "the block's barrier";
constexpr const char* kClusterBarrier = "the cluster's barrier";
constexpr const char* kPhase = "a wait for a phase";
constexpr const char* kEnd = "the end";

}  // namespace

struct Machine::Fiber {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  ucontext_t context;
  std::jmp_buf state;
  bool started = false;
  const char* waits_at = nullptr;  // the instruction this lane arrived at
  void* operands = nullptr;
  int32_t published = 0;
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

Machine::Machine(int threads, std::size_t shared_bytes, WarpOrder order, int blocks)
    : threads_(threads), warps_(threads / kLanes), blocks_(blocks), shared_bytes_(shared_bytes), order_(order),
      fibers_(threads * blocks), all_warps_(warps_ * blocks), spaces_(blocks) {
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
    fiber.published = 0;
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
  if (!std::all_of(begin, end, [name](const Warp& other) { return other.waits == name; })) return hand_over(after(warp));
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

// ------------------------------------------------------------------------------------------- shared memory

const char* Machine::memory() const { return spaces_[rank()].memory; }

std::size_t Machine::offset_of(const char* address) const { return address - memory(); }

std::size_t Machine::locate(const char* address, std::size_t bytes) {
  const std::ptrdiff_t offset = address - memory();
  if (offset < 0 || offset + bytes > shared_bytes_)
    give_up("an access outside shared memory, at byte " + std::to_string(offset));
  if (offset % bytes != 0) give_up("a misaligned access to shared memory, at byte " + std::to_string(offset));
  return offset / kCell;
}

void Machine::read_shared(const char* address, std::size_t bytes) {
  const std::size_t first = locate(address, bytes);
  Space& space = spaces_[rank()];
  const int self = thread();
  for (std::size_t index = first; index < first + bytes / kCell; ++index) {
    Cell& cell = space.cells[index];
    if (cell.under_way) report("reads" + byte(index) + " before its copy has been waited for");
    if (!cell.initialised) report("reads" + byte(index) + ", which nobody wrote");
    if (cell.written == space.epoch && cell.writer != self)
      report("reads" + byte(index) + ", which thread " + std::to_string(cell.writer) + " wrote since the last barrier");
    cell.reader = cell.read == space.epoch && cell.reader != self ? kMany : static_cast<int16_t>(self);
    cell.read = space.epoch;
  }
}

void Machine::touch_for_write(Cell& cell, std::size_t index) {
  const int32_t epoch = spaces_[rank()].epoch;
  const int self = thread();
  const bool read_elsewhere = cell.read == epoch && cell.reader != self;
  const bool written_elsewhere = cell.written == epoch && cell.writer != self;
  if (read_elsewhere || written_elsewhere)
    report("writes" + byte(index) + ", which another thread " +
           (read_elsewhere ? "read" : "wrote") + " since the last barrier");
  if (cell.products) report("writes" + byte(index) + ", which a product under way has yet to read");
  set_written(cell);
}

void Machine::set_written(Cell& cell) {
  cell.writer = static_cast<int16_t>(thread());
  cell.written = spaces_[rank()].epoch;
  cell.published = fibers_[thread_].published;
}

void Machine::write_shared(const char* address, std::size_t bytes) {
  const std::size_t first = locate(address, bytes);
  std::vector<Cell>& cells = spaces_[rank()].cells;
  for (std::size_t index = first; index < first + bytes / kCell; ++index) {
    if (cells[index].under_way) report("writes" + byte(index) + " while a copy is under way");
    touch_for_write(cells[index], index);
    cells[index].initialised = true;
  }
}

void Machine::copy_async(char* shared, const void* global, bool valid) {
  const std::size_t first = locate(shared, 16);
  std::vector<Cell>& cells = spaces_[rank()].cells;
  if (reinterpret_cast<std::uintptr_t>(global) % 16 != 0) give_up("a misaligned copy from global memory");
  for (std::size_t index = first; index < first + 16 / kCell; ++index) {
    if (cells[index].under_way) report("starts a copy over one that is under way");
    touch_for_write(cells[index], index);
    cells[index].under_way = true;
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
      const std::size_t first = offset_of(copy.shared) / kCell;
      for (std::size_t index = first; index < first + 16 / kCell; ++index) {
        Cell& cell = spaces_[rank()].cells[index];
        cell.under_way = false;
        cell.initialised = true;
        set_written(cell);
      }
    }
    groups.erase(groups.begin());
  }
}

// -------------------------------------------------------------------------------------------------- phases

void Machine::create_phase_barrier(const char* barrier, int arrivals) {
  const std::size_t first = locate(barrier, 8);
  Space& space = spaces_[rank()];
  for (std::size_t index = first; index < first + 2; ++index) {
    if (space.cells[index].under_way || space.cells[index].initialised) report("creates a phase barrier over data");
    space.cells[index].under_way = true;  // for good: whoever reads or writes it is found
  }
  space.phases.insert_or_assign(first * kCell, Phase{arrivals, arrivals, thread_, cluster_epoch_});
}

Machine::Phase& Machine::phase_at(int rank, std::size_t offset) {
  if (rank < 0 || rank >= blocks_) give_up("there is no block " + std::to_string(rank) + " in this cluster");
  const auto found = spaces_[rank].phases.find(offset);
  if (found == spaces_[rank].phases.end()) give_up("there is no phase barrier at byte " + std::to_string(offset));
  if (found->second.created == cluster_epoch_ && found->second.creator != thread_)
    report("uses a phase barrier that was created since the last barrier of the cluster");
  const auto begin = all_warps_.begin() + rank * warps_;
  if (std::all_of(begin, begin + warps_, [](const Warp& warp) { return warp.waits == kEnd; }))
    give_up("reaches into block " + std::to_string(rank) + " of the cluster, which has ended");
  return found->second;
}

void Machine::arrive(const char* barrier, int rank, int expected_bytes) {
  Phase& phase = phase_at(rank, offset_of(barrier));
  if (phase.missing == 0) give_up("more arrivals than the phase counts");
  --phase.missing;
  phase.expected += expected_bytes;
  if (phase.missing == 0 && phase.expected == 0 && phase.copies.empty()) phase.begin_next();
}

// Of a phase that nothing but its copies keeps from being over they arrive now.
bool Machine::phase_is_over(int rank, std::size_t offset, int parity) {
  Phase& phase = spaces_[rank].phases.at(offset);
  if (phase.number % 2 != parity) return true;
  if (phase.missing > 0 || phase.expected != phase.under_way()) return false;
  for (const Phase::Copy& copy : phase.copies) {
    std::memcpy(spaces_[rank].memory + copy.offset, copy.global, copy.bytes);
    for (std::size_t index = copy.offset / kCell; index < (copy.offset + copy.bytes) / kCell; ++index) {
      Cell& cell = spaces_[rank].cells[index];
      cell.under_way = false;
      cell.initialised = true;
      cell.writer = kCopied;
      cell.written = -1;
    }
  }
  phase.begin_next();
  return true;
}

void Machine::wait_for_phase(const char* barrier, int parity) {
  const int self = thread_;
  phase_at(rank(), offset_of(barrier));
  take_turns(kPhase);
  if (self % kLanes != kLanes - 1) return;
  Warp& warp = all_warps_[self / kLanes];
  warp.phase = offset_of(barrier);
  warp.parity = parity;
  warp.waits = kPhase;
  hand_over(self / kLanes);
}

void Machine::copy_to_blocks(char* shared, const void* global, int bytes, const char* barrier, int blocks) {
  const std::size_t offset = offset_of(shared), end = offset + bytes;
  if (offset % 16 || bytes % 16 || reinterpret_cast<std::uintptr_t>(global) % 16) give_up("a misaligned copy");
  if (shared < memory() || end > shared_bytes_) give_up("a copy outside shared memory");
  for (int rank = 0; blocks >> rank; ++rank) {
    if (!(blocks >> rank & 1)) continue;
    phase_at(rank, offset_of(barrier)).copies.push_back(
        {offset, static_cast<const char*>(global), static_cast<std::size_t>(bytes)});
    for (std::size_t index = offset / kCell; index < end / kCell; ++index) {
      Cell& cell = spaces_[rank].cells[index];
      if (cell.under_way) report("starts a copy over one that is under way");
      if (cell.products) report("starts a copy over" + byte(index) + ", which a product under way has yet to read");
      cell.under_way = true;
    }
  }
}

// ------------------------------------------------------------------------------------------------ products

void Machine::publish() { ++fibers_[thread_].published; }

void Machine::begin_products() { all_warps_[thread_ / kLanes].begun = true; }

void Machine::start_product(std::vector<std::size_t> rows, std::function<void()> work) {
  Warp& warp = all_warps_[thread_ / kLanes];
  Space& space = spaces_[rank()];
  if (!warp.begun) report("starts a product before its sums are fenced");
  for (const std::size_t row : rows) {
    if (row + 16 > shared_bytes_) give_up("a product reads outside shared memory, at byte " + std::to_string(row));
    for (std::size_t index = row / kCell; index < row / kCell + 16 / kCell; ++index) {
      Cell& cell = space.cells[index];
      if (cell.under_way) report("a product reads" + byte(index) + " before its copy has been waited for");
      if (!cell.initialised) report("a product reads" + byte(index) + ", which nobody wrote");
      if (cell.written == space.epoch) report("a product reads" + byte(index) + ", written since the last barrier");
      if (cell.writer >= 0 && fibers_[rank() * threads_ + cell.writer].published == cell.published)
        report("a product reads" + byte(index) + ", which its writer has not published");
      cell.reader = kMany;
      cell.read = space.epoch;
      ++cell.products;
    }
  }
  warp.open.push_back({std::move(rows), std::move(work)});
}

void Machine::commit_products() {
  Warp& warp = all_warps_[thread_ / kLanes];
  warp.groups.push_back(std::move(warp.open));
  warp.open.clear();
}

void Machine::wait_products(int pending) {
  Warp& warp = all_warps_[thread_ / kLanes];
  while (static_cast<int>(warp.groups.size()) > pending) {
    for (const Warp::Product& product : warp.groups.front()) {
      product.work();
      for (const std::size_t row : product.rows)
        for (std::size_t index = row / kCell; index < row / kCell + 16 / kCell; ++index)
          --spaces_[rank()].cells[index].products;
    }
    warp.groups.pop_front();
  }
  warp.begun = false;
}

}  // namespace wnfused::gpu::emulation

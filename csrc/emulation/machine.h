// One thread block on the host. Every CUDA thread is a fiber; fibers hand over to one another only where CUDA threads
// may have to wait: at a warp's collective instructions (all 32 lanes arrive, then the last one does the work of all)
// and at the block's barrier. Between two barriers the warps run one after another, in either order.
//
// Shared memory is watched cell by cell (4 bytes). A finding is reported when
//   - a thread reads what another wrote, or writes what another read or wrote, with no barrier between the two;
//   - a cell is read that nobody wrote, or whose asynchronous copy has not been waited for, or written while under way;
//   - an address is misaligned or outside the block's allocation;
//   - the lanes of a warp, or the warps of a block, do not arrive at the same instruction.
// Unwritten shared memory is filled with NaNs.
#pragma once

#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace wnfused::gpu::emulation {

constexpr int kLanes = 32;
constexpr std::size_t kCell = 4;

enum class WarpOrder { kForward, kReverse };

class Machine {
 public:
  Machine(int threads, std::size_t shared_bytes, WarpOrder order);
  ~Machine();
  Machine(const Machine&) = delete;

  // Runs `body` in every thread of block `block`; false if the block had to be given up.
  bool run(int block, const std::function<void(char*)>& body);

  static Machine& current();
  int thread() const { return thread_; }
  int lane() const { return thread_ % kLanes; }
  int block() const { return block_; }

  void barrier();
  // Posts this lane's `operands`; when all lanes have, `work` runs once with those of all.
  void collective(const char* name, void* operands, void (*work)(void* const* operands));

  void read_shared(const char* address, std::size_t bytes);
  void write_shared(const char* address, std::size_t bytes);
  void copy_async(char* shared, const void* global, bool valid);
  void commit_copies();
  void wait_copies(int pending);

  const std::vector<std::string>& findings() const { return findings_; }

 private:
  struct Fiber;
  struct Cell {
    int32_t written = -1, read = -1;   // the epoch of the last write and read
    int16_t writer = -1, reader = -1;  // and by which thread; kMany for several readers
    bool initialised = false, under_way = false;
  };
  struct Copy {
    char* shared;
    unsigned char bytes[16];
  };
  static constexpr int16_t kMany = -2;

  void report(const std::string& finding);
  [[noreturn]] void give_up(const std::string& finding);
  std::size_t locate(const char* address, std::size_t bytes);
  void touch_for_write(Cell& cell, std::size_t index);
  void arrive(const char* name);
  void resume(int thread);
  void finish();
  void start_fiber(int thread);
  static void enter();

  int threads_, warps_, thread_ = 0, block_ = 0;
  std::size_t shared_bytes_;
  WarpOrder order_;
  int32_t epoch_ = 0;
  std::vector<Fiber> fibers_;
  std::vector<char> allocation_;
  char* shared_ = nullptr;
  std::vector<Cell> cells_;
  std::vector<std::string> findings_;
  const std::function<void(char*)>* body_ = nullptr;
  std::jmp_buf home_;
};

}  // namespace wnfused::gpu::emulation

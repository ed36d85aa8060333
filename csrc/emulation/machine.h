// A cluster of thread blocks on the host; most kernels' have one block. Every CUDA thread is a fiber; fibers hand over
// to one another only where CUDA threads may have to wait: at a warp's collective instructions (all 32 lanes arrive,
// then the last one does the work of all), at barriers of the block and of the cluster, and where a warp waits for a
// phase. Between these the warps run one after another, in either order.
//
// Shared memory is watched cell by cell (4 bytes). A finding is reported when
//   - a thread reads what another wrote, or writes what another read or wrote, with no barrier between the two;
//   - a cell is read that nobody wrote, or whose asynchronous copy has not been waited for, or written while under way;
//   - an address is misaligned or outside the block's allocation;
//   - the lanes of a warp, or the warps of a block, do not arrive at the same instruction, or no warp can go on.
// Unwritten shared memory is filled with NaNs.
//
// Global memory is the arrays of a call and nothing else: a kernel that reads or writes beyond one, writes to one that
// is only to be read, or at an address that is not a multiple of the access's size, is given up.
//
// Copies to a cluster arrive as late as they may: when a warp of the block that they go to waits for their phase. So do
// a warpgroup's products: they are done when their group is waited for, but a finding is reported already
//   - where a product is started on cells that are not ready, or that a thread wrote and not a copy;
//   - when a cell is written or copied over that a product under way has yet to read.
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

// Of global memory.
struct Array {
  const char* data;
  std::size_t bytes;
  bool writable;
};

class Machine {
 public:
  Machine(int threads, std::size_t shared_bytes, WarpOrder order, const std::vector<Array>& arrays, int blocks = 1);
  ~Machine();
  Machine(const Machine&) = delete;

  // Runs `body` in every thread of the cluster whose first block is `first`; false if it had to be given up.
  bool run(int first, const std::function<void(char*)>& body);

  static Machine& current();
  int thread() const { return thread_ % threads_; }
  int lane() const { return thread_ % kLanes; }
  int rank() const { return thread_ / threads_; }
  int block() const { return first_block_ + rank(); }

  void barrier();
  void cluster_barrier();
  // Posts this lane's `operands`; when all lanes have, `work` runs once with those of all.
  void collective(const char* name, void* operands, void (*work)(void* const* operands));

  void read_shared(const char* address, std::size_t bytes);
  void write_shared(const char* address, std::size_t bytes);
  std::size_t offset_of(const char* address) const;
  void read_global(const void* address, std::size_t bytes) { touch_global(address, bytes, false); }
  void write_global(const void* address, std::size_t bytes) { touch_global(address, bytes, true); }
  void copy_async(char* shared, const void* global, bool valid);
  void commit_copies();
  void wait_copies(int pending);

  // Phase barriers, and copies of which they count the bytes.
  void create_phase_barrier(const char* barrier, int arrivals);
  void arrive(const char* barrier, int rank, int expected_bytes);
  void wait_for_phase(const char* barrier, int parity);
  void copy_to_blocks(char* shared, const void* global, int bytes, const char* barrier, int blocks);

  // Products of a whole warp, called by its last lane: `rows` are where the 16 bytes stand, by offset, that one reads.
  void begin_products();
  void start_product(std::vector<std::size_t> rows, std::function<void()> work);
  void commit_products();
  void wait_products(int pending);
  const char* memory() const;

  void report(const std::string& finding);
  [[noreturn]] void give_up(const std::string& finding);
  const std::vector<std::string>& findings() const { return findings_; }

 private:
  struct Fiber;
  struct Warp;
  struct Phase;
  struct Cell {
    int32_t written = -1, read = -1;   // the epoch of the last write and read
    int16_t writer = -1, reader = -1;  // and by which thread; kMany for several readers
    int16_t products = 0;              // under way that read it
    bool initialised = false, under_way = false;
  };
  struct Copy {
    char* shared;
    unsigned char bytes[16];
  };
  struct Space;  // a block's shared memory
  static constexpr int16_t kMany = -2, kCopied = -3;

  std::size_t locate(const char* address, std::size_t bytes);
  void touch_global(const void* address, std::size_t bytes, bool writes);
  void touch_for_write(Cell& cell, std::size_t index);
  void set_written(Cell& cell);
  Phase& phase_at(int rank, std::size_t offset);
  bool phase_is_over(int rank, std::size_t offset, int parity);
  void take_turns(const char* name);
  void resume(int thread);
  bool ready(int warp);
  int after(int warp) const;
  int first_of(int warp, int count) const;
  void hand_over(int warp);
  void wait_for_warps(const char* name, int first, int count);
  void finish();
  static void enter();

  int threads_, warps_, blocks_, thread_ = 0, first_block_ = 0;
  std::size_t shared_bytes_;
  WarpOrder order_;
  const std::vector<Array>& arrays_;
  std::size_t array_ = 0;  // the one that was met last, and mostly is again
  int32_t cluster_epoch_ = 0;
  std::vector<Fiber> fibers_;
  std::vector<Warp> all_warps_;  // of all blocks, as thread_ counts
  std::vector<Space> spaces_;
  std::vector<std::string> findings_;
  const std::function<void(char*)>* body_ = nullptr;
  std::jmp_buf home_;
};

}  // namespace wnfused::gpu::emulation

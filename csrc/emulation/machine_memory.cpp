// Memory under watch. Shared: who read and wrote each cell since the last barrier, and which copies are under way.
// Global: whether an access is within an array.
#include <algorithm>
#include <cstring>
#include <utility>

#include "emulation/machine_parts.h"

namespace wnfused::gpu::emulation {

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

void Machine::touch_global(const void* address, std::size_t bytes, bool writes) {
  const auto place = reinterpret_cast<std::uintptr_t>(address);
  if (bytes <= 16 && place % bytes != 0) give_up("a misaligned access to global memory");
  const auto holds = [&](const Array& array) {
    const std::uintptr_t offset = place - reinterpret_cast<std::uintptr_t>(array.data);
    return offset < array.bytes && bytes <= array.bytes - offset;
  };
  if (array_ >= arrays_.size() || !holds(arrays_[array_]))
    array_ = std::find_if(arrays_.begin(), arrays_.end(), holds) - arrays_.begin();
  if (array_ == arrays_.size()) give_up(std::string(writes ? "writes" : "reads") + " outside the arrays of the call");
  if (writes && !arrays_[array_].writable) give_up("writes to an array that is only to be read");
}

void Machine::copy_async(char* shared, const void* global, bool valid) {
  const std::size_t first = locate(shared, 16);
  std::vector<Cell>& cells = spaces_[rank()].cells;
  if (reinterpret_cast<std::uintptr_t>(global) % 16 != 0) give_up("a misaligned copy from global memory");
  if (valid) read_global(global, 16);
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

}  // namespace wnfused::gpu::emulation

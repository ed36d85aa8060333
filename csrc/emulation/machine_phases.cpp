// Barriers with phases, which count arrivals and bytes, and the copies that arrive at them.
#include <cstring>

#include "emulation/machine_parts.h"

namespace wnfused::gpu::emulation {

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
  read_global(global, static_cast<std::size_t>(bytes));
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

}  // namespace wnfused::gpu::emulation

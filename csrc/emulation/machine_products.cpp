// Products that read shared memory while their warps go on.
#include <utility>

#include "emulation/machine_parts.h"

namespace wnfused::gpu::emulation {

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
      if (cell.writer >= 0) report("a product reads" + byte(index) + ", which a thread wrote: it would need a fence");
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

// How the work of a convolution is cut into items for the workers of a call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "cpu/vec/lanes.h"

namespace wnfused::cpu {

constexpr int kMapPixels = 128;     // pixels that an item moves from one layout to the other
constexpr int kMaxPanelRows = 64;
constexpr int64_t kMaxBundleBlocks = 2;  // output blocks of a weight gradient's item
constexpr int64_t kMaxSlices = 16;  // of a weight gradient: each costs a bank and one more term of the final sum
constexpr int64_t kFinishRows = kLanes + 2;  // that finishing a block holds: its rows of dW, and one of v and of dv

// A piece of a phase's work: a part of the maps (a chunk, or a slice) and a bundle of output blocks. (A group is always
// one of a convolution in groups.)
struct Item {
  int64_t part, bundle;
};

// A map in the kernels' own layout.
struct MapShape {
  int64_t images, channels, height, width;
  int64_t channel_blocks, padded_channels;

  int64_t pixels() const { return images * height * width; }
  int64_t map_size() const { return pixels() * padded_channels; }
  // Runs of kMapPixels pixels, each within an image.
  int64_t image_runs() const { return divide_up(height * width, kMapPixels); }
  int64_t runs() const { return images * image_runs(); }
};

MapShape map_shape(int64_t images, int64_t channels, int64_t height, int64_t width);

constexpr int64_t kBankCache = 3 << 16;  // floats of a bank that a worker's cache has room for

// How many groups of so many channels fill whole blocks of them.
constexpr int64_t groups_in_blocks(int64_t channels) { return kLanes / std::gcd(channels, kLanes); }

// How the work of a convolution and of its weight gradient is divided among workers.
struct Division {
  // Neighbouring items, which one worker gets, share their output blocks and so their weights, or else their chunk or
  // slice of the maps: whichever is more memory stays in that worker's cache.
  bool weights_stay;
  bool weights_dominate;  // the bank is far more memory than the map: they stay where there are several workers
  // Whether every worker packs banks of its own (banks.h); its items fetch v ahead in so many parts.
  bool own_banks;
  int64_t fetch_parts;
  // A worker's bank has room for the blocks of one bundle alone.
  bool narrow_banks;
  // These are so few that they never leave its cache: they are packed, read and overwritten by the next bundle's. A
  // chunk's panel stays for the next bundle, if that is the next item and sums over the same channels.
  bool by_bundles;
  // A convolution: chunks of panel rows x bundles of output blocks.
  int64_t conv_rows, conv_chunks, conv_bundles, conv_bundle_blocks;
  // A weight gradient: slices of consecutive units, each summed into its own bank, x bundles of output blocks.
  int64_t wgrad_rows, wgrad_slices, wgrad_slice_units, wgrad_bundles, wgrad_bundle_blocks;

  int64_t conv_items() const { return conv_chunks * conv_bundles; }
  int64_t wgrad_items() const { return wgrad_slices * wgrad_bundles; }
  Item conv_item(int64_t index) const { return item(index, conv_chunks, conv_bundles); }
  Item wgrad_item(int64_t index) const { return item(index, wgrad_slices, wgrad_bundles); }
  // Whether a worker's bank holds the blocks of one bundle at a time.
  bool divides_banks() const { return weights_stay || by_bundles; }

 private:
  Item item(int64_t index, int64_t parts, int64_t bundles) const {
    return weights_stay ? Item{index % parts, index / parts} : Item{index / bundles, index % bundles};
  }
};

// Whether workers pack banks of their own, of a convolution that is divided already.
void choose_banks(int64_t output_blocks, int64_t workers, Division& division);

// What a convolution's division depends on.
struct Work {
  int64_t output_blocks;
  int64_t bank, map;  // floats of the bank, and of the map that is read
  int64_t gradient;   // floats that a slice of the weight gradient sums
  int64_t most_rows, staying_rows;  // of a panel; where weights stay
  int64_t workers;
  // Weights stay with a worker where a bank is so many times as much memory as a map: all workers read all inputs then,
  // and the lines of a map that one of them wrote go to every other one.
  int64_t stay;
};

// Chunks, bundles and banks of a convolution; chunks_of(rows) counts the chunks of panels of so many rows. None of this
// changes a result.
template <class Chunks>
void divide_convolution(const Work& work, const Chunks& chunks_of, Division& division) {
  // Items of a convolution that a worker should have, and rows of a panel below which register tiles are not full.
  constexpr int64_t kItemsEach = 2, kMinRows = 8;

  // Each worker packs and finishes the weights of its own output blocks then.
  division.weights_dominate = work.output_blocks > 1 && work.bank > work.stay * work.map;
  division.weights_stay = work.workers > 1 && division.weights_dominate;
  division.conv_rows = work.most_rows;
  if (division.weights_stay) {
    division.conv_rows = work.staying_rows;
    division.conv_bundle_blocks = divide_up(work.output_blocks, std::min(work.workers, work.output_blocks));
  } else {
    while (division.conv_rows > kMinRows && chunks_of(division.conv_rows) < kItemsEach * work.workers)
      division.conv_rows /= 2;
    const bool split = chunks_of(division.conv_rows) < work.workers;
    division.conv_bundle_blocks = split ? std::min(kMaxBundleBlocks, work.output_blocks) : work.output_blocks;
  }
  division.conv_chunks = chunks_of(division.conv_rows);
  division.conv_bundles = divide_up(work.output_blocks, division.conv_bundle_blocks);
  choose_banks(work.output_blocks, work.workers, division);
}

// Where each worker packs only some of the blocks, its bank has room for those alone: with room for all blocks, the
// banks of many workers would take gigabytes.
template <class G>
void narrow_banks(G& geometry) {
  if (!geometry.divides_banks() || !geometry.own_banks) return;
  geometry.plane_stride = geometry.conv_bundle_blocks * geometry.block_floats() + kLanes;
  geometry.narrow_banks = true;
}

// Divides a layer whose banks, of `block` floats for an output block, are larger than a worker's cache into bundles of
// at least `least` blocks, so that each is packed, read and overwritten there. False, and nothing is changed, where the
// banks fit.
template <class G>
bool divide_into_bundles(int64_t least, int64_t block, G& geometry) {
  if (geometry.conv_bundle_blocks * block <= kBankCache) return false;
  const int64_t most = geometry.conv_bundle_blocks;
  geometry.conv_bundle_blocks = std::clamp(kBankCache / block, std::min(least, most), most);
  geometry.conv_bundles = divide_up(geometry.output_blocks, geometry.conv_bundle_blocks);
  geometry.weights_stay = geometry.own_banks = geometry.by_bundles = true;
  narrow_banks(geometry);
  return true;
}

// Slices of a weight gradient whose banks, of so many floats each, do not take more memory than is to be had.
int64_t affordable_slices(int64_t gradient);

// Bundles of outputs of a weight gradient whose slices are known.
void divide_gradient_outputs(int64_t output_blocks, int64_t workers, Division& division);

// Slices and bundles of the weight gradient of a convolution that is divided already. Slices, which fix the order of
// every sum, depend on the units and their number alone.
void divide_gradient(const Work& work, int64_t units, int64_t slice_units, Division& division);

// The same of one that is a single product (product_wgrad.h).
void divide_product_gradient(const Work& work, int64_t pixels, Division& division);

}  // namespace wnfused::cpu

#include "cpu/conv/division.h"

namespace wnfused::cpu {

MapShape map_shape(int64_t images, int64_t channels, int64_t height, int64_t width) {
  const int64_t blocks = divide_up(channels, kLanes);
  return {images, channels, height, width, blocks, blocks * kLanes};
}

void choose_banks(int64_t output_blocks, int64_t workers, Division& division) {
  // How much longer packing takes where the bank is read by other cores (measured on two): with more workers than that
  // to divide it, one bank for all is packed sooner than one each.
  constexpr int64_t kSharingCost = 5;
  division.own_banks = division.weights_stay || std::min(workers, output_blocks) < kSharingCost;
  const int64_t items = std::max<int64_t>(division.conv_items(), 1);
  division.fetch_parts = division.own_banks && !division.weights_stay ? divide_up(items, workers) : items;
}

int64_t affordable_slices(int64_t gradient) {
  constexpr int64_t kGradients = int64_t{1} << 27;  // floats of all slices
  return std::clamp<int64_t>(kGradients / std::max<int64_t>(gradient, 1), 1, kMaxSlices);
}

void divide_gradient_outputs(int64_t output_blocks, int64_t workers, Division& division) {
  division.wgrad_bundle_blocks =
      std::min(kMaxBundleBlocks, division.weights_stay ? division.conv_bundle_blocks : output_blocks);
  if (division.wgrad_slices * divide_up(output_blocks, division.wgrad_bundle_blocks) < workers)
    division.wgrad_bundle_blocks = 1;
  division.wgrad_bundles = divide_up(output_blocks, division.wgrad_bundle_blocks);
}

void divide_gradient(const Work& work, int64_t units, int64_t slice_units, Division& division) {
  division.wgrad_rows = 32;
  const int64_t slices = std::clamp<int64_t>(units / slice_units, 1, affordable_slices(work.gradient));
  division.wgrad_slice_units =
      std::max<int64_t>(1, divide_up(divide_up(units, slices), division.wgrad_rows)) * division.wgrad_rows;
  division.wgrad_slices = std::max<int64_t>(1, divide_up(units, division.wgrad_slice_units));
  divide_gradient_outputs(work.output_blocks, work.workers, division);
}

void divide_product_gradient(const Work& work, int64_t pixels, Division& division) {
  // An item packs its channels of x for itself, a slice has a bank of its own: with so many blocks, so many pixels and
  // banks of so many floats in all both cost a few percent.
  constexpr int64_t kMostBlocks = 8, kSlicePixels = 256, kBanks = int64_t{1} << 20, kItemsEach = 2;
  const int64_t affordable = std::clamp<int64_t>(kBanks / std::max<int64_t>(work.bank, 1), 1, kMaxSlices);
  const int64_t slices = std::clamp<int64_t>(pixels / kSlicePixels, 1, affordable);
  division.wgrad_slice_units = std::max<int64_t>(1, divide_up(divide_up(pixels, slices), kLanes)) * kLanes;
  division.wgrad_slices = std::max<int64_t>(1, divide_up(pixels, division.wgrad_slice_units));
  int64_t groups = std::max<int64_t>(1, divide_up(work.output_blocks, kMostBlocks));
  while (groups < work.output_blocks && division.wgrad_slices * groups < kItemsEach * work.workers) ++groups;
  division.wgrad_bundle_blocks = std::max<int64_t>(1, divide_up(work.output_blocks, groups));
  division.wgrad_bundles = divide_up(work.output_blocks, division.wgrad_bundle_blocks);
}

}  // namespace wnfused::cpu

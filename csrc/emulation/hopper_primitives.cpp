#include "emulation/hopper_primitives.h"

#include <array>
#include <utility>
#include <vector>

namespace wnfused::gpu {
namespace {

using emulation::kLanes;

// An operand in shared memory as wgmma finds it by a descriptor.
struct Matrix {
  std::size_t start, depth_stride, row_stride;

  explicit Matrix(uint64_t descriptor)
      : start((descriptor & 0x3fff) << 4), depth_stride((descriptor >> 16 & 0x3fff) << 4),
        row_stride((descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 46 || descriptor >> 14 & 3 || descriptor >> 30 & 3)
      Machine::current().give_up("a descriptor with a swizzle, an offset, or strides of too many bits");
  }
  // Where the 8 values of k from 8 `eight` on stand in row `row`.
  std::size_t at(int row, int eight) const {
    return start + row / 8 * row_stride + row % 8 * 16 + eight * depth_stride;
  }
};

struct Product {
  float (*c)[4];
  uint64_t a, b;
};

constexpr int kRows = 16, kColumns = 64, kEights = 2;  // of one warp

void load_row(float* to, const char* from) {
  uint16_t values[8];
  std::memcpy(values, from, sizeof values);
  for (int i = 0; i < 8; ++i) to[i] = float_of_bits(static_cast<uint32_t>(values[i]) << 16);
}

void multiply(const std::array<float (*)[4], kLanes>& sums, const char* memory, const Matrix& x, const Matrix& y,
              int first_row) {
  float a[kRows][16], b[kColumns][16];
  for (int eight = 0; eight < kEights; ++eight) {
    for (int row = 0; row < kRows; ++row) load_row(a[row] + 8 * eight, memory + x.at(first_row + row, eight));
    for (int column = 0; column < kColumns; ++column) load_row(b[column] + 8 * eight, memory + y.at(column, eight));
  }
  for (int lane = 0; lane < kLanes; ++lane)
    for (int tile = 0; tile < kColumns / 8; ++tile)
      for (int i = 0; i < 4; ++i) {
        const float *row = a[lane / 4 + i / 2 * 8], *column = b[8 * tile + lane % 4 * 2 + i % 2];
        sums[lane][tile][i] = add_products(sums[lane][tile][i], row, column, 16);
      }
}

void start(void* const* all) {
  Machine& machine = Machine::current();
  const Product& product = *static_cast<Product*>(all[0]);
  std::array<float (*)[4], kLanes> sums;
  for (int lane = 0; lane < kLanes; ++lane) {
    const Product& other = *static_cast<Product*>(all[lane]);
    if (other.a != product.a || other.b != product.b) machine.give_up("the lanes of a warp name different operands");
    sums[lane] = other.c;
  }
  const Matrix x(product.a), y(product.b);
  const int first_row = machine.thread() / kLanes % 4 * kRows;
  std::vector<std::size_t> rows;
  for (int eight = 0; eight < kEights; ++eight) {
    for (int row = 0; row < kRows; ++row) rows.push_back(x.at(first_row + row, eight));
    for (int column = 0; column < kColumns; ++column) rows.push_back(y.at(column, eight));
  }
  machine.start_product(std::move(rows), [=, memory = machine.memory()] { multiply(sums, memory, x, y, first_row); });
}

}  // namespace

void begin_products() {
  Machine::current().collective("wgmma.fence", nullptr, [](void* const*) { Machine::current().begin_products(); });
}

void commit_products() {
  Machine::current().collective("wgmma.commit", nullptr, [](void* const*) { Machine::current().commit_products(); });
}

void wait_products(int pending) {
  Machine::current().collective("wgmma.wait", &pending, [](void* const* all) {
    Machine::current().wait_products(*static_cast<int*>(all[0]));
  });
}

void multiply_warpgroup(float (&c)[8][4], uint64_t a, uint64_t b) {
  Product product{c, a, b};
  Machine::current().collective("wgmma", &product, start);
}

}  // namespace wnfused::gpu

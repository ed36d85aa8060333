#include "emulation/hopper_primitives.h"

#include <array>
#include <memory>
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
  // Where piece `piece` of 16 bytes of row `row` stands.
  std::size_t at(int row, int piece) const {
    return start + row / 8 * row_stride + row % 8 * 16 + piece * depth_stride;
  }
};

struct Product {
  float (*c)[4];
  const uint32_t* a;
  uint64_t b;
  bool adds;
  int tiles, vector;
};

constexpr int kRows = 16, kPieces = 2;  // of one warp; its depth are so many pieces

// Two values of bf16, of which there are 8 in 16 bytes, or one of tf32, whose low bits products ignore.
void widen(float* to, uint32_t word, int vector) {
  if (vector == 8) {
    to[0] = float_of_bits(word << 16);
    to[1] = float_of_bits(word & 0xffff0000u);
  } else {
    to[0] = float_of_bits(word & ~0x1fffu);
  }
}

using Rows = std::array<std::array<float, 16>, kRows>;

// The rows of a that the lanes of a warp bring, as fragments of mma.
Rows gather(void* const* all, int vector) {
  Rows rows{};
  const int per_register = vector / 4;
  for (int lane = 0; lane < kLanes; ++lane)
    for (int i = 0; i < 4; ++i) {
      float* row = rows[lane / 4 + i % 2 * 8].data();
      widen(row + (i / 2 * 4 + lane % 4) * per_register, static_cast<Product*>(all[lane])->a[i], vector);
    }
  return rows;
}

// What a warp's product takes until it is waited for. It is no part of a lambda's closure: there two of the values of a
// came out as zeros, the same two in every product (g++ 12.2, -ftrivial-auto-var-init=pattern).
struct Task {
  std::array<float (*)[4], kLanes> sums;
  Rows a;
  Product product;
  const char* memory;
};

void multiply(const Task& task) {
  const auto& [sums, a, product, memory] = task;
  const int tiles = product.tiles, vector = product.vector;
  const Matrix y(product.b);
  for (int column = 0; column < 8 * tiles; ++column) {
    float b[16];
    for (int piece = 0; piece < kPieces; ++piece) {
      uint32_t words[4];
      std::memcpy(words, memory + y.at(column, piece), sizeof words);
      for (int i = 0; i < 4; ++i) widen(b + vector * piece + i * (vector / 4), words[i], vector);
    }
    for (int lane = column % 8 / 2; lane < kLanes; lane += 4)
      for (int half = 0; half < 2; ++half) {
        float& sum = sums[lane][column / 8][2 * half + column % 2];
        sum = add_products(product.adds ? sum : 0.0f, a[lane / 4 + 8 * half].data(), b, kPieces * vector);
      }
  }
}

void start(void* const* all) {
  Machine& machine = Machine::current();
  const Product& product = *static_cast<Product*>(all[0]);
  const auto task = std::make_shared<Task>();
  for (int lane = 0; lane < kLanes; ++lane) {
    const Product& other = *static_cast<Product*>(all[lane]);
    if (other.b != product.b) machine.give_up("the lanes of a warp name different operands");
    task->sums[lane] = other.c;
  }
  task->a = gather(all, product.vector);
  task->product = product;
  task->memory = machine.memory();
  const Matrix y(product.b);
  std::vector<std::size_t> rows;
  for (int piece = 0; piece < kPieces; ++piece)
    for (int column = 0; column < 8 * product.tiles; ++column) rows.push_back(y.at(column, piece));
  machine.start_product(std::move(rows), [task] { multiply(*task); });
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

void multiply_warpgroup(float (*c)[4], int tiles, const uint32_t (&a)[4], uint64_t b, bool adds, int vector) {
  Product product{c, a, b, adds, tiles, vector};
  Machine::current().collective("wgmma", &product, start);
}

}  // namespace wnfused::gpu

#include "emulation/primitives.h"

namespace wnfused::gpu {
namespace {

using emulation::kLanes;

struct Matrices {
  uint32_t* registers;
  const char* row;
};

void load_plain(void* const* all) {
  for (int matrix = 0; matrix < 4; ++matrix)
    for (int lane = 0; lane < kLanes; ++lane) {
      const char* row = static_cast<Matrices*>(all[8 * matrix + lane / 4])->row;
      std::memcpy(static_cast<Matrices*>(all[lane])->registers + matrix, row + lane % 4 * 4, 4);
    }
}

void load_turned(void* const* all) {
  for (int matrix = 0; matrix < 4; ++matrix)
    for (int lane = 0; lane < kLanes; ++lane)
      for (int half = 0; half < 2; ++half) {
        const char* row = static_cast<Matrices*>(all[8 * matrix + lane % 4 * 2 + half])->row;
        char* target = reinterpret_cast<char*>(static_cast<Matrices*>(all[lane])->registers + matrix);
        std::memcpy(target + 2 * half, row + lane / 4 * 2, 2);
      }
}

struct Product {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
};

// A tile product of depth kWide registers' worth per half, each register `kPer` values.
template <int kPer, class Unpack>
void multiply(void* const* all, const Unpack& unpack) {
  constexpr int kDepth = 8 * kPer;
  float a[16][kDepth], b[8][kDepth];
  for (int lane = 0; lane < kLanes; ++lane) {
    const Product& product = *static_cast<Product*>(all[lane]);
    const int row = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) unpack(product.a[i], &a[row + i % 2 * 8][(t + i / 2 * 4) * kPer]);
    for (int i = 0; i < 2; ++i) unpack(product.b[i], &b[row][(t + i * 4) * kPer]);
  }
  for (int lane = 0; lane < kLanes; ++lane)
    for (int i = 0; i < 4; ++i) {
      const float* x = a[lane / 4 + i / 2 * 8];
      const float* y = b[lane % 4 * 2 + i % 2];
      float& c = static_cast<Product*>(all[lane])->c[i];
      c = add_products(c, x, y, kDepth);
    }
}

template <class T>
struct Sum {
  T value;
};

// The same tree as the shuffles: in step d, lane i adds lane i ^ d.
template <class T>
void sum_lanes(void* const* all) {
  T values[kLanes], next[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) values[lane] = static_cast<Sum<T>*>(all[lane])->value;
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    for (int lane = 0; lane < kLanes; ++lane) next[lane] = values[lane] + values[lane ^ distance];
    std::memcpy(values, next, sizeof values);
  }
  for (int lane = 0; lane < kLanes; ++lane) static_cast<Sum<T>*>(all[lane])->value = values[lane];
}

void load(uint32_t (&r)[4], const char* row, const char* name, void (*work)(void* const*)) {
  Machine::current().read_shared(row, 16);
  Matrices matrices{r, row};
  Machine::current().collective(name, &matrices, work);
}

template <class T>
T sum(T value) {
  Sum<T> operand{value};
  Machine::current().collective("a warp's sum", &operand, sum_lanes<T>);
  return operand.value;
}

}  // namespace

void load_matrices(uint32_t (&r)[4], const char* row) { load(r, row, "ldmatrix", load_plain); }
void load_matrices_transposed(uint32_t (&r)[4], const char* row) { load(r, row, "ldmatrix.trans", load_turned); }

void multiply_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Product product{c, a, {b0, b1}};
  Machine::current().collective("mma.bf16", &product, [](void* const* all) {
    multiply<2>(all, [](uint32_t bits, float* pair) {
      pair[0] = float_of_bits(bits << 16);
      pair[1] = float_of_bits(bits & 0xffff0000u);
    });
  });
}

void multiply_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Product product{c, a, {b0, b1}};
  Machine::current().collective("mma.tf32", &product, [](void* const* all) {
    multiply<1>(all, [](uint32_t bits, float* value) { *value = float_of_bits(bits & ~0x1fffu); });
  });
}

float warp_sum(float value) { return sum(value); }
double warp_sum(double value) { return sum(value); }

}  // namespace wnfused::gpu

// AMX: what the processor has, the permission to use it, and a check of the instructions against their emulation.
#include "cpu/machine/amx.h"

#include "cpu/machine/amx_tiles.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstring>

namespace wnfused::cpu {
namespace {

// Leaf 7: TDPBF16PS and the tiles; XCR0: the system saves tile configuration and tile data.
bool processor_has_tiles() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  if ((d & kBf16) == 0 || (d & kTile) == 0) return false;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTileState = 3u << 17;
  return (low & kTileState) == kTileState;
}

// Linux grants the 8 KB of tile data to a process that asks.
bool permitted() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Values of every size: ordinary ones, ties, denormals, some that overflow.
uint16_t sample(int index) {
  const uint32_t mixed = (static_cast<uint32_t>(index) + 1) * 2654435761u;
  const uint32_t sign = mixed >> 31, fraction = (mixed >> 3) & 0x7f, exponent = index % 5 == 0 ? mixed >> 10 & 0xff
                                                                                          : 120 + (mixed >> 10 & 0xf);
  return static_cast<uint16_t>(sign << 15 | (exponent == 255 ? 254 : exponent) << 7 | fraction);
}

template <class Tiles>
void probe(float (&result)[tiles::kRows][tiles::kRows]) {
  uint16_t a[tiles::kRows][tiles::kDepth], b[tiles::kRows][tiles::kDepth];
  for (int i = 0; i < tiles::kRows * tiles::kDepth; ++i) {
    a[i / tiles::kDepth][i % tiles::kDepth] = sample(i);
    b[i / tiles::kDepth][i % tiles::kDepth] = sample(7919 + i);
  }
  Tiles::configure({});
  Tiles::template zero<0>();
  Tiles::template load<4>(a, tiles::kRowBytes);
  Tiles::template load<6>(b, tiles::kRowBytes);
  Tiles::template dot<0, 4, 6>();
  Tiles::template dot<0, 4, 6>();
  Tiles::template store<0>(result, tiles::kRowBytes);
  Tiles::release();
}

bool instructions_match_emulation() {
  float real[tiles::kRows][tiles::kRows], emulated[tiles::kRows][tiles::kRows];
  probe<tiles::Amx>(real);
  probe<tiles::Emulated>(emulated);
  for (int i = 0; i < tiles::kRows; ++i)
    for (int j = 0; j < tiles::kRows; ++j) {
      const bool both_nan = std::isnan(real[i][j]) && std::isnan(emulated[i][j]);
      if (!both_nan && std::memcmp(&real[i][j], &emulated[i][j], sizeof(float)) != 0) return false;
    }
  return true;
}

}  // namespace

bool amx_usable() {
  static const bool usable = processor_has_tiles() && permitted() && instructions_match_emulation();
  return usable;
}

}  // namespace wnfused::cpu

#else

namespace wnfused::cpu {

bool amx_usable() { return false; }

}  // namespace wnfused::cpu

#endif

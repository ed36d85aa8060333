// Which instruction set the kernels use: chosen once from the processor, or forced by tests. A name stands for two
// choices, the vectors of all kernels and how products of bfloat16 matrices are taken:
//
//   name           vectors    bfloat16 products
//   amx            AVX-512    tiles, TDPBF16PS
//   avx512_bf16    AVX-512    dot products, VDPBF16PS
//   avx512         AVX-512    as float
//   avx2           AVX2       as float
//   portable       128 bits   as float
//   amx-emulated   128 bits   the kernels of amx over tiles written in C++: for tests, never chosen by itself
#pragma once

namespace wnfused::cpu {

enum class Isa { kPortable, kAvx2, kAvx512 };
enum class PairProducts { kNone, kDots, kTiles, kEmulatedTiles };

// The vectors and the bfloat16 products in use.
Isa active_isa();
PairProducts active_pair_products();

// Whether pairs are multiplied in tiles, AMX's or emulated ones.
bool has_tiles();

}  // namespace wnfused::cpu

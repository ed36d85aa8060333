// Opens the part of a translation unit that is compiled for 128-bit vectors, which every processor has.
#pragma once

#define WNFUSED_ISA portable
#define WNFUSED_VECTOR_BITS 128

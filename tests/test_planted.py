"""Planted bugs: each changes one line of a copy of the kernels' sources, and the emulation must notice.

What a bug does to a GPU differs (a race that loses once in a thousand runs, a wrong value at a border); what notices it
here differs as well: the machine's watch on shared memory and on copies under way, or the comparison with float64.
A change whose text is no longer in the sources fails, so that these stay bugs of the code that there is.
"""

import faulthandler
import os
import signal

import pytest
import torch
from emulator import Case, Tree, entry, load
from test_emulation_stage import check

KERNEL, CONV, PACK = "cuda/stage_kernel.h", "cuda/stage_conv.h", "cuda/stage_pack.h"
GRADIENT, ROWS, CONFIG = "cuda/gradient_kernel.h", "cuda/gradient_rows.h", "cuda/stage_config.h"

# What is broken: (file, the text, what takes its place).
BUGS = {
    "the halo's row is left out": (CONFIG, "kCentre = kPaddedWidth + 1", "kCentre = 1"),
    "the border is not cleared": (KERNEL, "store_shared(shared + i, Bytes16{});", ";"),
    "a copy overwrites the slot in use": (
        KERNEL, "fetch_chunk(chunk + Config::kSlots - 1)", "fetch_chunk(chunk + Config::kSlots)",
    ),
    "the wait is one group short": (
        KERNEL, "wait_copies<Config::kSlots - 2>()", "wait_copies<Config::kSlots - 1>()",
    ),
    "the barrier of a chunk is missing": (
        KERNEL, "wait_copies<Config::kSlots - 2>();\n      block_barrier();", "wait_copies<Config::kSlots - 2>();",
    ),
    "input is stored before the border is cleared": (
        KERNEL, "kernel.clear_operands();\n    block_barrier();", "kernel.clear_operands();",
    ),
    "one buffer without its barrier": (KERNEL, "if (Config::kBuffers == 1) block_barrier();", ";"),
    "both convolutions work in one buffer": (KERNEL, "operand = next_operand;", ""),
    "sums go on to the next convolution": (KERNEL, "sums[i][j][k] = 0.0f;\n    return value;", "return value;"),
    "the mask is the operand of the other convolution": (
        KERNEL, "activations + map_offset(conv) : nullptr", "activations + map_offset(conv - 1) : nullptr",
    ),
    "the mask lets zero through": (KERNEL, "Precision::low(a) <= 0.0f", "Precision::low(a) < 0.0f"),
    "the gradient is scaled once too often": (KERNEL, "kBackward && last ? 1.0f", "kBackward && false ? 1.0f"),
    "a ragged batch writes past its end": (
        KERNEL, "left < Config::kPixels ? static_cast<int>(left) : Config::kPixels", "Config::kPixels",
    ),
    "halves of the k-step swapped": (
        CONV, "operand + lane_index() / 16 * Config::kPlaneBytes + warp.window(0",
        "operand + (1 - lane_index() / 16) * Config::kPlaneBytes + warp.window(0",
    ),
    "a row is used one output row late": (CONV, "int output_row = row - ky;", "int output_row = row - ky + 1;"),
    "registers of a fragment in the wrong order": (
        PACK, "n / 8 % 2 * 2 + depth / (4 * kPerRegister)", "n / 8 % 2 + depth / (4 * kPerRegister) * 2",
    ),
    "taps of the backward not flipped": (
        PACK, "packed_index<Precision, kChannels>(k, n, 8 - tap)", "packed_index<Precision, kChannels>(k, n, tap)",
    ),
    "channels of the backward not exchanged": (
        PACK, "packed_index<Precision, kChannels>(k, n, 8 - tap)", "packed_index<Precision, kChannels>(n, k, 8 - tap)",
    ),
    "a slice of the batch counted twice": (ROWS, "for (int slice = 0;", "for (int slice = -(params.slices > 1);"),
    "the warps of a tile do not wait for each other's sums": (
        GRADIENT, "block_barrier();\n    }\n    for (int row", "}\n    block_barrier();\n    for (int row",
    ),
    "dv keeps its part along v": (ROWS, "value(j, q) - unit * load_value", "value(j, q) - 0.0f * load_value"),
    "the scale of dv lacks the norm": (ROWS, "load_value(params.g, row) * inverse", "load_value(params.g, row)"),
    "images past the batch are not zero": (
        GRADIENT, "kGradientPlaneBytes + pixel * 16, inside ? maps + from * 16 : maps, inside);",
        "kGradientPlaneBytes + pixel * 16, inside ? maps + from * 16 : maps, true);",
    ),
    "a band takes the row above for its own": (
        GRADIENT, "pixel % kBand / Config::kWidth - kHalo", "pixel % kBand / Config::kWidth",
    ),
}  # fmt: skip

# A regular map with row reuse, bands and two buffers; one with several images a block; a ragged one with one buffer.
CONFIGURATIONS = ("bfloat16 16x32x32", "bfloat16 32x4x4", "tf32 64x7x7")


def cases(module):
    for name in CONFIGURATIONS:
        facts = entry(module, name)
        images = 1 if facts["images"] == 1 else facts["gradient_images"] + 1
        for reverse in (False, True):
            yield Case(facts, images, blocks=2, reverse=reverse)


def noticed(module):
    """Whether any case shows the bug; in a child, since a bug may never end."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        faulthandler.disable()  # a bug may read anywhere
        torch.set_num_threads(1)  # the parent's pool of threads does not live here
        code = 0
        try:
            code = 1 if any(check(case, module) for case in cases(module)) else 0
        except BaseException:
            code = 2
        os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert status != 2 << 8, "the check itself failed"
    return status != 0


@pytest.fixture(scope="module")
def tree():
    pytest.importorskip("pybind11")
    return Tree.original().only(set(CONFIGURATIONS))


def test_planted_nothing_is_noticed_without_a_bug(tree):
    assert not noticed(load(tree.build()))


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_noticed(tree, bug):
    assert noticed(load(tree.replaced(*BUGS[bug]).build()))

"""Planted bugs: each changes one line of a copy of the kernels' sources, and the emulation must notice.

What a bug does to a GPU differs (a race that loses once in a thousand runs, a wrong value at a border); what notices it
here differs as well: the machine's watch on shared memory and on copies under way, or the comparison with float64.
A change whose text is no longer in the sources fails, so that these stay bugs of the code that there is.
"""

import faulthandler
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from emulator import Case, Tree, entry, load
from test_emulation_layer import check_mask
from test_emulation_small_linear import KINDS, check_layer
from test_emulation_stage import check

KERNEL, TILE, CONV = "cuda/stage_kernel.h", "cuda/stage_tile.h", "cuda/stage_conv.h"
GRADIENT, ROWS, CONFIG = "cuda/gradient_kernel.h", "cuda/gradient_rows.h", "cuda/stage_config.h"
PACK, WARPGROUP, HOPPER = "cuda/stage_pack.h", "cuda/stage_warpgroup.h", "cuda/hopper.h"
DRIVER = "cuda/stage_driver.cu"
PRECISION = "cuda/precision.h"
MASK = "cuda/layer_mask.h"
SMALL, FORWARD = "cuda/small_linear.h", "cuda/small_linear_forward.h"
INPUT, WEIGHT = "cuda/small_linear_input.h", "cuda/small_linear_weight.h"
BACKWARD = "cuda/small_linear_backward.h"

# What is broken: (file, the text, what takes its place).
BUGS = {
    "the halo's row is left out": (CONFIG, "kCentre = kPaddedWidth + 1", "kCentre = 1"),
    "the border is not cleared": (TILE, "store_shared(shared + i, Bytes16{});", ";"),
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
    "both convolutions work in one buffer": (TILE, "operand = next_operand;", ""),
    "sums go on to the next convolution": (TILE, "sums[i][j][k] = 0.0f;\n    return value;", "return value;"),
    "the signs are those of the block before": (
        TILE, "ending.signs = load_signs(conv / 2)", "ending.signs = load_signs(conv / 2 - 1)",
    ),
    "the mask lets zero through": (PRECISION, "(pair + 0x7fff7fffu) >> 15", "(pair + 0x80008000u) >> 15"),
    "the high value of a pair is taken for the low one": (TILE, "passes & 16", "passes & 1"),
    "signs are kept as they come": (TILE, "(interleaved(bits & kMask, bits >> 16 & kMask))", "(bits)"),
    "signs of the images past the batch are written": (
        TILE, "if (is_pixel(i * kWordTiles, 0)) body(", "body(",
    ),
    "the gradient is scaled once too often": (TILE, "kBackward && last ? 1.0f", "kBackward && false ? 1.0f"),
    "a ragged batch writes past its end": (
        TILE, "left < Config::kPixels ? static_cast<int>(left) : Config::kPixels", "Config::kPixels",
    ),
    "a ragged batch reads past its end": (TILE, "if (inside) value[k] = scale", "value[k] = scale"),
    "weights are asked for past the last": (
        KERNEL, "if (index < 2 * params.blocks * Config::kChunks) {", "{",
    ),
    "a convolution's bias is its block's": (
        TILE, "params.bias + conv * Config::kChannels", "params.bias + conv / 2 * 2 * Config::kChannels",
    ),
    "half of the warps do not keep the operand": (KERNEL, "if (keeps && !keeps_first()) this->keep_operand(conv);", ""),
    "of no blocks a checkpoint is read": (
        DRIVER, "problem_.recompute > 0 && problem_.blocks > 0", "problem_.recompute > 0",
    ),
    "the gradients' maps are those of the forward": (
        DRIVER, "params.operands = space_.gradients;", "params.operands = operands();",
    ),
    "halves of the k-step swapped": (
        CONV, "pixels = operand + lane_index() / 16 * Config", "pixels = operand + (1 - lane_index() / 16) * Config",
    ),
    "rows that a tap needs together are put together wrongly": (
        CONV, "{before[1], rows[0], before[3], rows[2]}", "{before[0], rows[1], before[2], rows[3]}",
    ),
    "the last pair of rows is left out": (CONV, "pair <= Config::kTiles", "pair < Config::kTiles"),
    "a row is used one output row late": (CONV, "int output_row = row - ky;", "int output_row = row - ky + 1;"),
    "registers of a fragment in the wrong order": (
        PACK, "reg / 2 * 8 + lane / 4", "reg % 2 * 8 + lane / 4",
    ),
    "taps of the backward not flipped": (
        PACK, "kBackward ? 8 - weight.tap : weight.tap", "weight.tap",
    ),
    "channels of the backward not exchanged": (
        PACK, "n = kBackward ? weight.k : weight.n, k = kBackward ? weight.n : weight.k",
        "n = kBackward ? weight.n : weight.n, k = kBackward ? weight.k : weight.k",
    ),
    "pieces of the backward are those of the forward": (PACK, "if (!by_input) return (fragment", "return (fragment"),
    "weights are gathered before all rows are scaled": (
        PACK, "block_barrier();\n    if (params.forward)", "if (params.forward)",
    ),
    "units of x are turned by another column": (
        GRADIENT, "turn = kIsInput ? Config::kBorder + column", "turn = kIsInput ? column + 1",
    ),
    "the second unit is always the one above": (
        GRADIENT, "Config::kUnitBytes - 2 * (first & Config::kUnitBytes)", "Config::kUnitBytes",
    ),
    "two rows of a pair are put together wrongly": (
        GRADIENT, "{{before.value[1], rows.value[0], before", "{{before.value[0], rows.value[0], before",
    ),
    "a row of x meets the row of g below": (
        GRADIENT, "multiply(3 * ky + kx, g[row % 3]", "multiply(3 * ky + kx, g[y % 3]",
    ),
    "a slice of the batch counted twice": (ROWS, "for (int slice = 0;", "for (int slice = -(params.slices > 1);"),
    "the warps of a tile do not wait for each other's sums": (
        GRADIENT, "block_barrier();\n    }\n    for (int row", "}\n    block_barrier();\n    for (int row",
    ),
    "dv keeps its part along v": (ROWS, "value(j, q) - unit * load_value", "value(j, q) - 0.0f * load_value"),
    "the scale of dv lacks the norm": (ROWS, "load_value(params.g, row) * inverse", "load_value(params.g, row)"),
    "images past the batch are not zero": (
        GRADIENT, "inside ? maps + from : maps, inside);", "inside ? maps + from : maps, true);",
    ),
    "a band takes the row above for its own": (
        GRADIENT, "row = i - number * kRows - kHalo", "row = i - number * kRows",
    ),
}  # fmt: skip

WARPGROUP_BUGS = {
    "rows of the map a row of the operand too far apart": (
        WARPGROUP, "kRowBytes = Config::kPaddedWidth * 16", "kRowBytes = Config::kWidth * 16",
    ),
    "the strides of a descriptor exchanged": (
        HOPPER, "(depth_stride >> 4) << 16 | static_cast<uint64_t>(row_stride >> 4) << 32",
        "(row_stride >> 4) << 16 | static_cast<uint64_t>(depth_stride >> 4) << 32",
    ),
    "a descriptor moves by bytes": (HOPPER, "descriptor + (bytes >> 4)", "descriptor + bytes"),
    "the stride of the weights is that of the operand": (WARPGROUP, "kWeightPlane, 128);", "kWeightPlane, kRowBytes);"),
    "the k-step's plane is passed over": (
        WARPGROUP, "pixels + 2 * depth * kPlaneBytes + i", "pixels + depth * kPlaneBytes + i",
    ),
    "the weights of a k-step are those of the one before": (
        WARPGROUP, "+ 2 * depth * kWeightPlane);", "+ 2 * (depth / 2) * kWeightPlane);",
    ),
    "two rows of a pair are put together wrongly": (
        WARPGROUP, "{upper[1], lower[0], upper[3], lower[2]}", "{upper[0], lower[0], upper[2], lower[2]}",
    ),
    "the taps of a column are turned round": (WARPGROUP, "ky == 0 ? upper : lower", "ky == 2 ? upper : lower"),
    "a convolution adds to the sums of the one before": (
        WARPGROUP, "group > 0 || depth > 0 || ky > 0", "true",
    ),
    "channels of packed weights exchanged": (
        WARPGROUP, "piece % kChannels, piece / kChannels % kPlanes * kVector + index % kVector",
        "piece / kChannels % kPlanes * kVector + index % kVector, piece % kChannels",
    ),
    "the parity of a full slot does not flip": (
        WARPGROUP, "wait_for_phase(full(chunk), phase_of(chunk) % 2)", "wait_for_phase(full(chunk), 0)",
    ),
    "the parity of an empty slot is that of its next phase": (
        WARPGROUP, "(phase_of(index) - 1) % 2", "phase_of(index) % 2",
    ),
    "a slot is filled again without waiting": (
        WARPGROUP, "if (index >= Config::kSlots) wait_for_phase", "if (0) wait_for_phase",
    ),
    "nobody waits for a chunk": (WARPGROUP, "wait_for_phase(full(chunk), phase_of(chunk) % 2);", ";"),
    "a chunk is released before its products are done": (
        WARPGROUP, "if (group > 0) wait_products<1>();", "if (group > 0) wait_products<2>();",
    ),
    "a chunk's products are those of the one before": (
        WARPGROUP, "first_chunk + group / kChunkGroups;", "first_chunk + (group - 1) / kChunkGroups;",
    ),
    "sums are used before the products are done": (
        WARPGROUP, "wait_products<0>();\n    settle", "wait_products<1>();\n    settle",
    ),
    "products are never committed": (WARPGROUP, "commit_products();", ""),
    "sums are not fenced": (WARPGROUP, "begin_products();", ""),
    "the operand's barrier is missing": (WARPGROUP, "block_barrier();  // the operand is complete", ""),
    "a block expects its own share alone": (
        WARPGROUP, "arrive_expecting(full(index), Config::kChunkBytes)", "arrive_expecting(full(index), kShareBytes)",
    ),
    "one block of the cluster is left out": (WARPGROUP, "(1 << Config::kCluster) - 1", "(1 << Config::kCluster) - 2"),
    "every block sends the first share": (WARPGROUP, "cluster_rank() * kShareBytes", "0 * kShareBytes"),
    "a slot counts its own block's warps alone": (
        WARPGROUP, "Config::kWarps * Config::kCluster);", "Config::kWarps);",
    ),
    "barriers are used before the others have made theirs": (
        WARPGROUP, "kernel.clear_operands();\n    cluster_barrier();", "kernel.clear_operands();\n    block_barrier();",
    ),
    "a block ends while others arrive at its barriers": (
        WARPGROUP, "cluster_barrier();  // others arrive", "// others arrive",
    ),
    "a block past the batch writes": (WARPGROUP, "kEmptyBlocks = kCluster > 1", "kEmptyBlocks = false"),
}  # fmt: skip

SMALL_BUGS = {
    "sums are read before they are written": (
        FORWARD, "first_sample, shared);\n    block_barrier();", "first_sample, shared);",
    ),
    "norms are read before they are written": (
        FORWARD, "    block_barrier();\n    if (writes)", "    if (writes)",
    ),
    "columns past the last are read": (FORWARD, "column < params.columns", "true"),
    "samples past the last are read": (FORWARD, "own < params.samples ? own : params.samples - 1", "own"),
    "a warp skips every other step": (
        FORWARD, "first_sample, start + ahead * kStride", "first_sample, start + 2 * ahead * kStride",
    ),
    "all steps of a round are its first": (FORWARD, "now = read[ahead]", "now = read[0]"),
    "what is to be added is not read": (FORWARD, "if (params.residual) value +=", "if (false) value +="),
    "the lower rows of a product are the upper ones": (
        SMALL, "{upper.word[0], lower.word[0], upper.word[1], lower.word[1]}",
        "{upper.word[0], upper.word[0], upper.word[1], upper.word[1]}",
    ),
    "rows of the sum in another order than the other operand's": (
        INPUT, "scale[0] * of.at(params, 0), scale[1] * of.at(params, 1)",
        "scale[1] * of.at(params, 1), scale[0] * of.at(params, 0)",
    ),
    "rows of v are read before they are there": (INPUT, "wait_copies<0>();", ""),
    "the sums, or the next rows, overtake who still reads v": (INPUT, "block_barrier();  // the next", "// the next"),
    "every other round of rows is left out": (INPUT, "first += kRound", "first += 2 * kRound"),
    "all steps of a round have the first one's dy": (INPUT, "upper = scaled(dz.of[ahead]", "upper = scaled(dz.of[0]"),
    "a thread's scales are those of the next rows": (INPUT, "row = first + line;", "row = first + line + kScales;"),
    "columns side by side change places": (INPUT, "+ side) * 4,", "+ 1 - side) * 4,"),
    "gradients are read before they are kept": (
        WEIGHT, "wait_copies<0>();\n    block_barrier();", "wait_copies<0>();",
    ),
    "a row's sum leaves out four warps": (WEIGHT, "i < kWarps / 4; ++i", "i < kWarps / 4 - 1; ++i"),
    "dg is read before it is kept": (
        WEIGHT, "sum_dots(params, first_row + warp, shared);\n    block_barrier();",
        "sum_dots(params, first_row + warp, shared);",
    ),
    "the samples past the last step are left out": (
        WEIGHT, "(params.samples + kStep - 1) / kStep * kStep", "params.samples / kStep * kStep",
    ),
    "gradients of zero rows": (WEIGHT, "dv[i] = zero ? 0.0f : scale", "dv[i] = zero ? 1.0f : scale"),
    "v is used before it is there": (WEIGHT, "wait_copies<0>();", ""),
    "both rows of a lane have the first one's v": (WEIGHT, "row % kRows * kLineOfV", "place.row % kRows * kLineOfV"),
    "pieces of a group change places": (WEIGHT, "(first + piece) * kWarps", "(first + kGroup - 1 - piece) * kWarps"),
    "the first round comes again": (WEIGHT, "params, column, first, start)", "params, column, first, 0)"),
    "the weight gradient begins with another's block": (BACKWARD, "block_index() - inputs", "block_index()"),
    "a block of the weight gradient is the input's": (BACKWARD, "block_index() < inputs", "block_index() <= inputs"),
}  # fmt: skip

MASK_BUGS = {
    "a share of pixels has one of the next": (
        MASK, "(share + 1) * span < pixels ? (share + 1) * span : pixels",
        "(share + 1) * span + 1 < pixels ? (share + 1) * span + 1 : pixels",
    ),
    "every share of a channel begins with the first plane": (MASK, "i = share * span + thread", "i = thread"),
    "sums are read before all are there": (MASK, "sums[k]);\n    block_barrier();", "sums[k]);"),
    "the sums of a line are left out": (MASK, "int from = 0; from < lines", "int from = 1; from < lines"),
    "sums are of the gradient before its mask": (MASK, "add(k, widen(dz.value[k]))", "add(k, value)"),
    "planes are another channel's": (
        MASK, "image * params.channels + channel", "image * params.channels + params.channels - 1 - channel",
    ),
    "the last warp's sum is left out": (MASK, "lane_index() < kWarps ?", "lane_index() < kWarps - 1 ?"),
    "vectors that do not lie whole in a channel": (MASK, "% kVector == 0 && is", "% kVector >= 0 && is"),
}  # fmt: skip

# A regular map with row reuse, bands and two buffers; one with several images a block; a ragged one with one buffer;
# one whose k-steps are two rows.
CONFIGURATIONS = ("bfloat16 16x32x32", "bfloat16 32x4x4", "tf32 64x7x7", "bfloat16 16x8x8")


# Two whole clusters and a block of the next; the ring goes round four times.
WARPGROUP_CONFIGURATION = "bfloat16 64x8x8 sm_90a"


def stage_faults(module):
    for name in CONFIGURATIONS:
        facts = entry(module, name)
        images = 1 if facts["images"] == 1 else facts["gradient_images"] + 1
        for reverse in (False, True):
            yield check(Case(facts, images, blocks=2, reverse=reverse), module)
        yield check(Case(facts, images, blocks=0, recompute=2), module)


def warpgroup_faults(module):
    facts = entry(module, WARPGROUP_CONFIGURATION)
    for reverse in (False, True):
        yield check(Case(facts, 5, blocks=5, reverse=reverse, parameters=False), module)


def small_faults(module):
    torch.manual_seed(0)
    for reverse in (False, True):
        yield check_layer(module, (33, 20, 520), *KINDS[0], "leaky_relu", 0.1, reverse)
        yield check_layer(module, (3, 524, 24), *KINDS[0], "leaky_relu", 0.1, reverse)


def mask_faults(module):
    torch.manual_seed(0)
    for reverse in (False, True):
        for case in ((700 * 16, 16, 1), (3 * 5 * 50, 5, 50), (2 * 2 * 2300, 2, 2300), (33 * 70, 70, 1)):
            try:
                check_mask(module, *case, torch.float32, 0.1, 3, reverse)
                yield []
            except AssertionError as wrong:
                yield [str(wrong)]


def noticed(module, faults):
    """Whether any case shows the bug; in a child, since a bug may never end."""
    child = os.fork()
    if child == 0:
        # Of processor time: a busy machine is no bug. Without one the checks take less than two seconds of it.
        signal.setitimer(signal.ITIMER_PROF, 10)
        faulthandler.disable()  # a bug may read anywhere
        torch.set_num_threads(1)  # the parent's pool of threads does not live here
        code = 0
        try:
            code = 1 if any(faults(module)) else 0
        except BaseException:
            code = 2
        os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert status != 2 << 8, "the check itself failed"
    return status != 0


# The configurations that are compiled, the bugs, and the checks that are to notice them.
PLANTED = {
    "stage": (CONFIGURATIONS, BUGS, stage_faults),
    "warpgroups": ((WARPGROUP_CONFIGURATION,), WARPGROUP_BUGS, warpgroup_faults),
    "small layers": ((), SMALL_BUGS, small_faults),
    "mask": ((), MASK_BUGS, mask_faults),
}


def tree_of(part):
    return Tree.original().only(set(PLANTED[part][0]))


@pytest.fixture(scope="module")
def libraries(request):
    """For each bug a future of its library: the compiler is ahead of the checks, on all processors."""
    pytest.importorskip("pybind11")
    wanted = [item.callspec.params for item in request.session.items if item.function is test_planted_bug_is_noticed]
    for part in {params["part"] for params in wanted}:
        tree_of(part).build()  # what its bugs leave alone, which is not to be compiled by two at a time
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {}
        for part, bug in ((params["part"], params["bug"]) for params in wanted):
            futures[part, bug] = pool.submit(tree_of(part).replaced(*PLANTED[part][1][bug]).build)
        yield futures
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("part", PLANTED)
def test_planted_nothing_is_noticed_without_a_bug(part):
    pytest.importorskip("pybind11")
    assert not noticed(load(tree_of(part).build()), PLANTED[part][2])


@pytest.mark.parametrize(("part", "bug"), [(part, bug) for part, (_, bugs, _) in PLANTED.items() for bug in bugs])
def test_planted_bug_is_noticed(libraries, part, bug):
    assert noticed(load(libraries[part, bug].result()), PLANTED[part][2])

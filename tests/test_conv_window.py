"""Layers of any window that the C++ kernels multiply directly: strides, paddings, dilations, one and two dims."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from instruction_sets import ISAS
from own_conv import (
    LAYOUTS,
    Case,
    assert_close,
    assert_layouts_agree,
    assert_masks_nan_as_torch,
    assert_not_finite_as_torch,
    assert_only_what_is_needed,
    assert_same_bits_by_threads,
    assert_zero_rows_and_gains,
    both,
    method_of,
    sample,
    way_of,
    ways_of,
    weight_shape,
)

import wnfused
from wnfused import reference
from wnfused.backends import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

# A direct sum over at most 128 taps and 64 channels, or 5000 products; and row norms of as many entries.
TOLERANCE = 64 * 2.0**-24

CASES = {
    "1x1": Case(2, 24, 40, (9, 7), (1, 1), (1, 1), (0, 0), (1, 1)),
    "1x1, whole blocks": Case(3, 32, 64, (8, 8), (1, 1), (1, 1), (0, 0), (1, 1)),
    "1x1, stride 2": Case(2, 16, 32, (9, 8), (1, 1), (2, 2), (0, 0), (1, 1)),
    "1x1, padded": Case(2, 16, 16, (4, 5), (1, 1), (1, 1), (1, 2), (1, 1)),
    "3x3, stride 2": Case(2, 16, 32, (12, 9), (3, 3), (2, 2), (1, 1), (1, 1)),
    "3x3, stride 2, of ragged blocks": Case(3, 20, 23, (8, 8), (3, 3), (2, 2), (1, 1), (1, 1)),
    "3x3, no padding": Case(5, 16, 16, (3, 4), (3, 3), (1, 1), (0, 0), (1, 1)),
    "stride beyond the kernel": Case(2, 16, 16, (11, 10), (2, 1), (3, 4), (0, 0), (1, 1)),
    "uneven": Case(2, 17, 31, (10, 13), (4, 3), (1, 2), (3, 0), (2, 3)),
    "padding beyond the kernel": Case(1, 16, 24, (5, 4), (3, 2), (2, 1), (5, 7), (1, 2)),
    "5x5, stride 2, many small images": Case(21, 16, 32, (4, 5), (5, 5), (1, 2), (2, 2), (1, 1)),
    "3x3, stride 2, many small images": Case(40, 32, 16, (4, 4), (3, 3), (2, 2), (1, 1), (1, 1)),
    "7x7, mostly padding": Case(5, 32, 48, (4, 5), (7, 7), (1, 1), (3, 3), (1, 1)),
    "3x3, dilated, mostly padding": Case(3, 32, 20, (14, 11), (3, 3), (1, 1), (7, 6), (7, 6)),
    "three dims, mostly padding": Case(4, 16, 32, (3, 4, 4), (3, 5, 3), (1, 2, 1), (1, 2, 2), (1, 1, 2)),
    "64 taps": Case(1, 16, 16, (12, 12), (8, 8), (1, 2), (4, 4), (1, 1)),
    "weights larger than the map": Case(2, 64, 80, (5, 5), (5, 5), (2, 2), (2, 2), (1, 1)),
    "weights packed group by group": Case(2, 256, 272, (12, 11), (3, 3), (2, 2), (1, 1), (1, 1)),
    "one dim": Case(2, 16, 32, (57,), (2,), (1,), (1,), (1,)),
    "one dim, dilated": Case(1, 24, 24, (100,), (7,), (2,), (15,), (5,)),
    "one dim, padding beyond the kernel": Case(1, 24, 24, (100,), (7,), (1,), (31,), (5,)),
    "one dim, dilation beyond the map": Case(2, 24, 16, (9,), (3,), (1,), (10,), (10,)),
    "one dim, stride 4": Case(3, 32, 48, (41,), (8,), (4,), (2,), (1,)),
    "one dim, pointwise": Case(2, 40, 16, (33,), (1,), (1,), (0,), (1,)),
    "1x1, many inputs": Case(3, 136, 40, (11, 17), (1, 1), (1, 1), (0, 0), (1, 1)),
    "1x1, many channels": Case(2, 128, 304, (16, 17), (1, 1), (1, 1), (0, 0), (1, 1)),
    "one dim, pointwise, many inputs": Case(2, 160, 24, (300,), (1,), (1,), (0,), (1,)),
    "120 taps": Case(1, 16, 24, (14, 13), (10, 12), (2, 1), (5, 6), (1, 1)),
    "one dim, 128 taps, groups": Case(2, 64, 64, (40,), (128,), (2,), (64,), (1,), groups=2),
    "an image": Case(2, 3, 24, (12, 9), (5, 4), (2, 2), (2, 1), (1, 1)),
    "an image, 3x3": Case(3, 3, 16, (8, 9), (3, 3), (1, 1), (1, 1), (1, 1)),
    "an image, 11x11": Case(2, 3, 40, (23, 19), (11, 11), (4, 4), (2, 2), (1, 1)),
    "an image, dilated": Case(2, 2, 17, (10, 11), (3, 3), (1, 1), (2, 2), (2, 2)),
    "an image, dilated rows": Case(2, 5, 16, (10, 11), (3, 4), (1, 2), (2, 1), (3, 1)),
    "one channel": Case(3, 1, 16, (9, 8), (7, 7), (1, 1), (3, 3), (1, 1)),
    "one channel, many small images": Case(20, 1, 32, (4, 4), (3, 3), (1, 1), (1, 1), (1, 1)),
    "7 channels, pointwise": Case(2, 7, 33, (6, 5), (1, 1), (1, 1), (0, 0), (1, 1)),
    "a waveform": Case(2, 1, 20, (170,), (15,), (1,), (7,), (1,)),
    "a waveform, stride 4": Case(2, 2, 16, (171,), (41,), (4,), (20,), (1,)),
    "1x1, ragged": Case(3, 44, 28, (13, 7), (1, 1), (1, 1), (0, 0), (1, 1)),
    "1x1, ragged, many inputs": Case(2, 133, 70, (16, 9), (1, 1), (1, 1), (0, 0), (1, 1)),
    "ragged, stride 2, no border": Case(3, 21, 34, (9, 11), (3, 3), (2, 2), (0, 0), (1, 1)),
    "three dims": Case(2, 16, 32, (5, 6, 7), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1)),
    "three dims, ragged": Case(2, 20, 23, (6, 5, 7), (3, 2, 3), (1, 2, 1), (0, 1, 2), (2, 1, 1)),
    "three dims, pointwise": Case(2, 24, 40, (4, 5, 6), (1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1)),
    "three dims, pointwise, many channels": Case(1, 144, 40, (7, 6, 8), (1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1)),
    "a volume": Case(2, 1, 16, (6, 7, 8), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
    "a video": Case(1, 3, 24, (5, 9, 8), (3, 5, 4), (1, 2, 2), (1, 2, 1), (1, 1, 1)),
    "frames one by one": Case(2, 16, 24, (5, 9, 8), (1, 3, 3), (1, 2, 2), (0, 1, 1), (1, 1, 1)),
    "pixels over time": Case(1, 16, 24, (5, 6, 4), (2, 1, 1), (1, 1, 1), (1, 0, 0), (1, 1, 1)),
    "one level, padded": Case(1, 16, 16, (1, 6, 4), (3, 2, 1), (1, 1, 1), (1, 0, 0), (1, 1, 1)),
    "levels of one row": Case(1, 16, 16, (6, 1, 5), (2, 1, 3), (1, 1, 1), (1, 0, 1), (1, 1, 1)),
    "three dims, many small images": Case(21, 16, 16, (3, 4, 4), (3, 3, 2), (2, 1, 1), (1, 1, 1), (1, 1, 1)),
    "three dims, groups": Case(2, 32, 64, (4, 5, 6), (3, 3, 3), (1, 1, 2), (1, 1, 1), (1, 1, 1), groups=2),
    "three dims, stride beyond the levels": Case(1, 16, 16, (2, 6, 5), (1, 3, 3), (3, 1, 1), (0, 1, 1), (1, 1, 1)),
    "groups": Case(2, 32, 64, (9, 7), (3, 3), (1, 2), (1, 1), (1, 1), groups=2),
    "groups, stride 2": Case(3, 96, 48, (8, 9), (5, 4), (2, 2), (2, 1), (1, 1), groups=3),
    "groups of 8 channels": Case(2, 32, 64, (9, 8), (3, 3), (2, 1), (1, 1), (1, 2), groups=4),
    "groups of 4 channels": Case(2, 16, 64, (9, 8), (3, 3), (2, 1), (1, 1), (1, 1), groups=4),
    "groups of 4 channels, many small images": Case(20, 16, 128, (4, 4), (3, 2), (1, 1), (1, 1), (1, 1), groups=4),
    "groups of 4 channels, one dim": Case(2, 32, 128, (61,), (41,), (4,), (20,), (1,), groups=8),
    "groups of 8 channels, one tap": Case(2, 32, 64, (9, 8), (1, 1), (1, 2), (0, 1), (1, 1), groups=4),
    "1x1, as large as its map": Case(2, 16, 32, (4, 4), (1, 1), (2, 2), (2, 2), (1, 1)),
    "groups, pointwise": Case(3, 64, 64, (6, 6), (1, 1), (1, 1), (0, 0), (1, 1), groups=4),
    "groups, one dim": Case(2, 64, 128, (61,), (41,), (2,), (20,), (1,), groups=8),
    "groups, many small images": Case(20, 64, 32, (4, 4), (3, 2), (1, 1), (1, 1), (1, 1), groups=2),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
NAMED = (
    "three dims, ragged",
    "1x1",
    "3x3, stride 2, of ragged blocks",
    "one dim, stride 4",
    "groups of 8 channels",
    "groups of 4 channels",
    "an image",
)
SOME = [CASES[name] for name in NAMED]


@every_case
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_window_and_layout(vectors, case, layout):
    if len(case.size) == 1 and layout != "nchw":
        pytest.skip("channels_last is of two dims and three")
    assert method_of(case) == "direct"
    tensors = sample(case, layout)
    assert_layouts_agree(case, tensors, TOLERANCE)


ONE_OR_TWO_OUTPUTS = {
    "1x1, stride 2": Case(2, 40, 1, (9, 7), (1, 1), (2, 1), (0, 0), (1, 1)),
    "3x3, stride 2": Case(3, 33, 2, (12, 9), (3, 3), (2, 2), (1, 1), (1, 1)),
    "three dims": Case(2, 24, 1, (4, 5, 6), (3, 3, 2), (2, 1, 2), (1, 1, 1), (1, 1, 1)),
    "three dims, transposed": Case(
        1, 20, 2, (3, 4, 5), (2, 2, 2), (2, 2, 2), (0, 0, 0), (1, 1, 1), transposed=True, output_padding=(0, 0, 0)
    ),
}


@pytest.mark.parametrize("case", ONE_OR_TWO_OUTPUTS.values(), ids=ONE_OR_TWO_OUTPUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_or_two_outputs(vectors, case, layout):
    """By AVX2, which leaves half of a block out; elsewhere too many of the products would be padding."""
    assert ways_of(case, last=True)[0] == ("direct" if vectors == "avx2" else "vendor")
    assert_layouts_agree(case, sample(case, layout), TOLERANCE)


@pytest.mark.parametrize("case", SOME, ids=str)
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4)), ids=str)
def test_only_what_is_needed(needs, case):
    assert_only_what_is_needed(case, needs, TOLERANCE)


def each(dims: int, values: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[values] * dims)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dims = draw(st.integers(1, 3))
    counts = (draw(st.integers(1, 18)), draw(st.integers(6, 40)), draw(st.integers(6, 40)))
    window = [draw(each(dims, st.integers(least, most))) for least, most in ((1, 5), (1, 3), (0, 6), (1, 3))]
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    if groups > 1:
        blocks = st.integers(1, 2 if groups == 4 else 3)
        counts = (counts[0], groups * draw(st.sampled_from([4, 8, 16, 48])), groups * 16 * draw(blocks))
    return Case(*counts, draw(each(dims, st.integers(1, 14))), *window, groups=groups)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    case=cases(),
    layout=st.sampled_from(sorted(LAYOUTS)),
    strided=st.booleans(),
    activation=st.sampled_from(["none", "relu", "leaky_relu"]),
    isa_name=st.sampled_from(ISAS),
    seed=st.integers(0, 2**16),
)
def test_drawn_windows(case, layout, strided, activation, isa_name, seed):
    assume(min(case.output_size) > 0)
    assume(math.prod(weight_shape(case)[1:]) >= 4)  # a row of one entry has a gradient of 0, but for rounding
    tensors = sample(case, layout, seed)
    if strided:
        tensors[0] = tensors[0].mT.contiguous().mT
        tensors[4] = torch.stack([tensors[4]] * 2, -1).flatten(-2)[..., ::2]
    torch.ops.wnfused_native.set_cpu_isa(isa_name)
    try:
        found, wanted = both(case, tensors, activation)
    finally:
        torch.ops.wnfused_native.set_cpu_isa("auto")
    assert_close(found, wanted, 4 * TOLERANCE)  # what Winograd takes of them is drawn, too


@pytest.mark.parametrize("case", [*SOME, Case(8, 48, 64, (16, 16), (3, 3), (2, 2), (1, 1), (1, 1))], ids=str)
def test_threads_and_runs_change_no_bit(vectors, case):
    assert_same_bits_by_threads(case)


def test_huge_outputs_change_no_bit_by_threads(vectors):
    """Finite, though their sum is not."""
    x = torch.rand(1, 64, 8, 16, generator=torch.Generator().manual_seed(0)) * 4e35
    v, before, found = torch.ones(64, 64, 1, 1), torch.get_num_threads(), []
    window = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(native.conv(x, v, torch.ones(64), None, None, *window, 0, "none", 0.0)[0])
    finally:
        torch.set_num_threads(before)
    assert found[0].isfinite().all()
    assert all(torch.equal(y, found[0]) for y in found)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("which", [0, 3, 4], ids=["x", "bias", "residual"])
@pytest.mark.parametrize("case", SOME, ids=str)
def test_what_is_not_finite_is_the_vendors(vectors, case, which, value):
    """Padding times an infinity would be NaN, in a kernel that multiplies it."""
    assert_not_finite_as_torch(case, which, value)


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 32, 32, (8, 8), (1, 1), (1, 1), (1, 1), (1, 1)),
        Case(2, 32, 32, (8,), (4,), (2,), (4,), (1,)),
        Case(2, 3, 16, (8, 8), (1, 1), (1, 1), (1, 1), (1, 1)),
    ],
    ids=["1x1, padded", "one dim", "an image"],
)
def test_a_gradient_that_is_not_finite_at_an_output_in_the_padding(vectors, case):
    """It meets no pixel, but torch multiplies it by the padding."""
    x, v, g, *_ = sample(case)
    tail = (*case.geometry, 0, "none", 0.1)
    y, norm = native.conv(x, v, g, None, None, *tail)
    dy = torch.ones_like(y)
    dy.view(-1)[0] = torch.nan
    found = native.conv_backward(dy, y, x, v, g, norm, [True, True, False, False], *tail)
    wanted = reference.conv_backward(dy, y, x, v, g, norm, [True, True, False, False], *tail)
    assert wanted[1].isnan().any()
    for actual, expected in zip(found[:3], wanted[:3], strict=True):
        assert torch.equal(actual.isnan(), expected.isnan())


@pytest.mark.parametrize("case", SOME, ids=str)
def test_zero_rows_and_gains(vectors, case):
    assert_zero_rows_and_gains(case, TOLERANCE)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_masks_nan_as_torch(vectors, case):
    assert_masks_nan_as_torch(case, TOLERANCE)


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 16, 16, (12, 12), (10, 13), (1, 1), (6, 6), (1, 1)),
        Case(1, 16, 16, (12, 12), (5, 5), (5, 4), (2, 2), (1, 1)),
        Case(1, 2, 1, (3, 4, 5), (2, 2, 2), (2, 2, 2), (0, 0, 0), (1, 1, 1), transposed=True),
        Case(1, 512, 512, (2, 2), (1, 1), (1, 1), (0, 0), (1, 1), groups=2),
        Case(1, 16, 16, (8, 8), (3, 3), (1, 1), (8192, 8192), (1, 1)),
        Case(1, 24, 48, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1), groups=3),
        Case(1, 24, 96, (8, 8), (3, 3), (2, 2), (1, 1), (1, 1), groups=6),
        Case(1, 32, 16, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1), groups=2),
        Case(1, 32, 32, (8, 8), (3, 3), (2, 2), (1, 1), (1, 1), groups=8),
        Case(1, 32, 24, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1), groups=3),
        Case(1, 32, 32, (8,), (4,), (2,), (1,), (1,), transposed=True, groups=2),
        Case(1, 16, 16, (4, 8, 8), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), groups=16),
        Case(1, 16, 16, (1, 8, 8), (1, 3, 3), (3, 1, 1), (1, 1, 1), (1, 1, 1), groups=16),
    ],
    ids=[
        "taps",
        "grids",
        "padded channels",
        "few pixels to a weight",
        "a border of a gigabyte",
        "an odd number of groups of 8 channels",
        "six groups of 4 channels",
        "groups of 8 outputs",
        "groups of 4 channels, strided",
        "groups that do not divide",
        "transposed groups",
        "depthwise, three dims",
        "depthwise, levels of padding",
    ],
)
def test_what_is_left_to_the_vendor(case):
    assert method_of(case) == "vendor"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "case",
    [
        Case(2, 12, 12, (4, 5, 6), (3, 3, 3), (1, 2, 1), (1, 1, 1), (1, 1, 1), groups=12),
        Case(1, 16, 16, (1, 8, 8), (1, 3, 3), (2, 1, 1), (0, 1, 1), (1, 1, 1), groups=16),
    ],
    ids=["depthwise", "depthwise, one level and a stride of two"],
)
def test_volumes_that_are_the_vendors(case, layout):
    assert way_of(case) == "vendor"
    for activation in ("none", "relu"):
        assert_close(*both(case, sample(case, layout), activation), TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "case",
    [
        Case(2, 16, 24, (4, 5, 6), (5, 3, 2), (1, 1, 1), (2, 1, 1), (1, 1, 1)),
        Case(2, 16, 16, (8, 8, 8), (5, 5, 2), (1, 1, 1), (2, 2, 1), (1, 1, 1)),
        Case(2, 32, 40, (2, 7, 6), (3, 1, 1), (1, 1, 1), (1, 0, 0), (1, 1, 1)),
        Case(9, 40, 20, (2, 2, 2), (2, 2, 2), (1, 1, 1), (0, 0, 0), (1, 1, 1)),
    ],
    ids=["5x3x2", "many taps", "over time alone", "weights larger than the map"],
)
def test_volumes_that_wide_vectors_take(vectors, case, layout):
    assert way_of(case) == ("vendor" if vectors in ("avx2", "portable") else "direct")
    assert_layouts_agree(case, sample(case, layout), TOLERANCE)


def test_lengths_that_vary():
    """Audio comes in any length: the same layer, one call after another."""
    torch.manual_seed(0)
    layer = wnfused.WNConv1d(32, 32, 7, padding=9, dilation=3, activation="leaky_relu")
    for length in (1, 2, 63, 64, 65, 127, 1000):
        x = torch.randn(1, 32, length)
        plain = torch.conv1d(x.double(), layer.weight.double(), layer.bias.double(), padding=9, dilation=3)
        wanted = torch.nn.functional.leaky_relu(plain, layer.negative_slope)
        torch.testing.assert_close(layer(x).double(), wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())

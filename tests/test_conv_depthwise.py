"""Depthwise layers, every channel a group of its own, by the C++ kernels made for them."""

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
    NAMES,
    Case,
    assert_close,
    assert_layouts_agree,
    assert_masks_nan_as_torch,
    assert_not_finite_as_torch,
    assert_only_what_is_needed,
    assert_same_bits_by_threads,
    assert_zero_rows_and_gains,
    both,
    run,
    sample,
    way_of,
)

from wnfused import reference
from wnfused.backends import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

# A direct sum over at most 128 taps, or 10,000 products.
TOLERANCE = 64 * 2.0**-24


def depthwise(images, channels, size, kernel, stride=None, padding=None, dilation=None):
    one = (1,) * len(size)
    padding = tuple(k // 2 for k in kernel) if padding is None else padding
    window = (tuple(kernel), stride or one, padding, dilation or one)
    return Case(images, channels, channels, tuple(size), *window, groups=channels)


CASES = {
    "3x3": depthwise(2, 32, (9, 10), (3, 3)),
    "11x11": depthwise(2, 24, (15, 14), (11, 11)),
    "3x3, stride 2": depthwise(2, 48, (9, 12), (3, 3), (2, 2)),
    "5x5": depthwise(2, 32, (9, 10), (5, 5)),
    "7x7": depthwise(1, 64, (14, 14), (7, 7)),
    "uneven strides": depthwise(2, 40, (11, 8), (7, 4), (2, 3), (3, 1), (1, 2)),
    "stride beyond the kernel": depthwise(1, 16, (11, 10), (2, 1), (3, 4), (0, 0)),
    "ragged": depthwise(3, 21, (8, 8), (4, 4), None, (0, 0)),
    "two channels": depthwise(3, 2, (8, 8), (4, 4), None, (2, 2)),
    "dilated": depthwise(1, 32, (13, 17), (3, 3), None, (6, 4), (6, 4)),
    "padding beyond the kernel": depthwise(2, 16, (3, 4), (3, 2), (2, 1), (5, 7)),
    "rows that meet nothing": depthwise(1, 16, (1, 1), (1, 2), (3, 3), (1, 1)),
    "many small images": depthwise(19, 16, (2, 2), (5, 5)),
    "tiles of rows": depthwise(1, 80, (70, 33), (3, 3)),
    "tiles of rows and columns": depthwise(1, 32, (25, 300), (3, 3), (2, 1)),
    "groups of blocks": depthwise(3, 400, (8, 7), (3, 3)),
    "one dim": depthwise(2, 48, (75,), (19,)),
    "one dim, tiles": depthwise(2, 16, (3000,), (31,)),
    "one dim, dilated": depthwise(1, 24, (700,), (9,), (2,), (100,), (25,)),
}
SOME = [CASES[name] for name in ("3x3, stride 2", "ragged", "one dim, tiles")]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_window_and_layout(vectors, case, layout):
    if len(case.size) == 1 and layout != "nchw":
        pytest.skip("channels_last is of two dims")
    assert way_of(case) == "direct"
    assert_layouts_agree(case, sample(case, layout), TOLERANCE)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dims = draw(st.integers(1, 2))

    def each(least: int, most: int) -> tuple[int, ...]:
        return draw(st.tuples(*[st.integers(least, most)] * dims))

    size = each(1, 40 if dims == 2 else 600)
    counts = draw(st.integers(1, 6)), draw(st.sampled_from([2, 8, 16, 17, 32, 40, 96]))
    return depthwise(*counts, size, each(1, 7), each(1, 3), each(0, 9), each(1, 4))


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
    assume(math.prod(case.kernel) >= 4)  # a row of one entry has a gradient of 0, but for rounding
    tensors = sample(case, layout, seed)
    if strided:
        tensors[0] = tensors[0].mT.contiguous().mT
        tensors[4] = torch.stack([tensors[4]] * 2, -1).flatten(-2)[..., ::2]
    torch.ops.wnfused_native.set_cpu_isa(isa_name)
    try:
        found, wanted = both(case, tensors, activation)
    finally:
        torch.ops.wnfused_native.set_cpu_isa("auto")
    assert_close(found, wanted, 4 * TOLERANCE)


@pytest.mark.parametrize("case", SOME, ids=str)
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4)), ids=str)
def test_only_what_is_needed(needs, case):
    assert_only_what_is_needed(case, needs, TOLERANCE)


@pytest.mark.parametrize("case", [*SOME, depthwise(8, 96, (32, 32), (3, 3))], ids=str)
def test_threads_and_runs_change_no_bit(vectors, case):
    assert_same_bits_by_threads(case)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("which", [0, 1, 3, 4], ids=["x", "v", "bias", "residual"])
@pytest.mark.parametrize("case", SOME, ids=str)
def test_what_is_not_finite_comes_out_as_torchs(vectors, case, which, value):
    assert_not_finite_as_torch(case, which, value)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["x", "dy"])
@pytest.mark.parametrize("case", SOME, ids=str)
def test_gradients_that_are_not_finite_come_out_as_torchs(vectors, case, where, value):
    """A zero beside the map times an infinity would be NaN, in a sum that has no such term."""
    tensors = sample(case)
    y, _ = native.conv(*tensors, *case.geometry, 0, "none", 0.0)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9))
    (tensors[0] if where == "x" else dy).view(-1)[0] = value
    found = run(native.conv, native.conv_backward, case, tensors, dy, "none")
    wide = [t.double() for t in tensors]
    wanted = run(reference.conv, reference.conv_backward, case, wide, dy.double(), "none")
    for name in NAMES:
        assert torch.equal(found[name].isfinite(), wanted[name].isfinite()), name


@pytest.mark.parametrize("case", SOME, ids=str)
def test_zero_rows_and_gains(vectors, case):
    assert_zero_rows_and_gains(case, TOLERANCE)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_masks_nan_as_torch(vectors, case):
    assert_masks_nan_as_torch(case, TOLERANCE)


def test_maps_of_any_size_are_taken():
    for size in ((4096, 4096), (1, 2**24), (2**24, 1)):
        assert way_of(depthwise(1, 16, size, (3, 3))) == "direct"


@pytest.mark.parametrize(
    "case",
    [
        depthwise(1, 16, (80, 80), (12, 11)),
        depthwise(1, 16, (20, 20), (5, 5), (5, 4)),
        depthwise(1, 16, (8, 8), (3, 3), None, (8192, 8192)),
        depthwise(1, 112, (8, 8), (3, 3), None, (600, 600)),
        Case(1, 16, 32, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1), groups=16),
        Case(1, 16, 16, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1), transposed=True, groups=16),
    ],
    ids=["taps", "grids", "a border of a gigabyte", "a border of megabytes", "two outputs a channel", "transposed"],
)
def test_what_is_left_to_the_vendor(case):
    assert way_of(case) == "vendor"

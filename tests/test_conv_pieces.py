"""Layers of stride 1 whose kernels' rows the C++ kernels cut into pieces, each by Winograd's method over one dim."""

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
    sample,
    way_of,
    weight_shape,
)

import wnfused
from wnfused.backends import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

# As the window kernels', for two to three times the error of a direct sum.
TOLERANCE = 128 * 2.0**-24


def line(images: int, inputs: int, outputs: int, size: int, kernel: int, padding: int, dilation: int = 1) -> Case:
    return Case(images, inputs, outputs, (size,), (kernel,), (1,), (padding,), (dilation,))


CASES = {
    "3 taps": line(2, 16, 32, 57, 3, 1),
    "4 taps": line(2, 32, 16, 50, 4, 2),
    "5 taps": line(1, 24, 40, 61, 5, 2),
    "7 taps": line(3, 17, 33, 64, 7, 3),
    "8 taps, no padding": line(1, 48, 24, 45, 8, 0),
    "11 taps, dilated": line(1, 32, 32, 203, 11, 25, 5),
    "causal": line(2, 16, 16, 90, 3, 16, 8),
    "short phases": line(2, 16, 16, 35, 3, 9, 9),
    "23 taps": line(1, 16, 24, 150, 23, 11),
    "many small images": line(40, 16, 32, 8, 3, 1),
    "more channels than samples": line(1, 80, 96, 24, 3, 1),
    "5x5": Case(2, 16, 24, (9, 13), (5, 5), (1, 1), (2, 2), (1, 1)),
    "7x7, ragged": Case(1, 23, 30, (11, 20), (7, 7), (1, 1), (3, 3), (1, 1)),
    "3x3, no padding": Case(2, 32, 16, (10, 11), (3, 3), (1, 1), (0, 0), (1, 1)),
    "3x3, padding 2": Case(2, 16, 40, (8, 10), (3, 3), (1, 1), (2, 2), (1, 1)),
    "3x3, dilated": Case(2, 24, 24, (12, 15), (3, 3), (1, 1), (2, 4), (2, 4)),
    "3x3, rows far apart": Case(1, 16, 16, (12, 23), (3, 3), (1, 1), (12, 3), (12, 3)),
    "2x3": Case(3, 16, 16, (9, 10), (2, 3), (1, 1), (1, 1), (1, 1)),
    "1x7": Case(2, 16, 32, (6, 21), (1, 7), (1, 1), (0, 3), (1, 1)),
    "7x1": Case(2, 16, 32, (21, 6), (7, 1), (1, 1), (3, 0), (1, 1)),
    "3x1, dilated": Case(2, 32, 16, (18, 5), (3, 1), (1, 1), (4, 0), (2, 1)),
    "5x5, many small images": Case(21, 16, 32, (4, 8), (5, 5), (1, 1), (2, 2), (1, 1)),
    "7 taps, many outputs": Case(1, 16, 320, (7, 16), (3, 7), (1, 1), (1, 3), (1, 1)),
    "three dims": Case(2, 16, 24, (5, 6, 9), (3, 3, 3), (1, 1, 1), (0, 1, 0), (1, 1, 1)),
    "three dims, ragged, dilated": Case(1, 20, 23, (6, 5, 12), (3, 2, 3), (1, 1, 1), (2, 1, 2), (2, 1, 2)),
    "5x5x5": Case(1, 16, 16, (4, 6, 8), (5, 5, 5), (1, 1, 1), (2, 2, 2), (1, 1, 1)),
    "pixels over time": Case(2, 16, 24, (9, 6, 4), (3, 1, 1), (1, 1, 1), (1, 0, 0), (1, 1, 1)),
    "groups": Case(2, 32, 64, (9, 7), (3, 3), (1, 1), (0, 1), (1, 1), groups=2),
    "groups, 7 taps": line(2, 96, 48, 70, 7, 3)._replace(groups=3),
    "groups of 4 channels": Case(2, 32, 32, (11, 12), (3, 3), (1, 1), (0, 1), (1, 1), groups=8),
    "groups of 4 channels, 41 taps": line(2, 16, 16, 150, 41, 20)._replace(groups=4),
    "groups of 4 channels, over time": Case(1, 16, 16, (9, 6, 8), (3, 1, 1), (1, 1, 1), (1, 0, 0), (1, 1, 1), groups=4),
    "groups of many channels": Case(1, 192, 192, (7, 8), (3, 5), (1, 1), (1, 2), (1, 1), groups=4),
    "one dim, 128 taps, groups": line(2, 64, 64, 200, 128, 64)._replace(groups=2),
    "three dims, groups": Case(2, 32, 64, (4, 5, 6), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), groups=2),
    "columns over time": Case(2, 16, 24, (6, 8, 5), (3, 4, 1), (1, 1, 1), (1, 2, 0), (1, 1, 1)),
}
NAMED = (
    "11 taps, dilated",
    "7x7, ragged",
    "3x3, dilated",
    "three dims, ragged, dilated",
    "5 taps",
    "groups, 7 taps",
    "groups of 4 channels",
)
SOME = [CASES[name] for name in NAMED]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kernel_and_layout(vectors, case, layout):
    if len(case.size) == 1 and layout != "nchw":
        pytest.skip("channels_last is of two dims and three")
    assert way_of(case) == "pieces"
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
    counts = (draw(st.integers(1, 18)), draw(st.integers(8, 40)), draw(st.integers(6, 40)))
    size = draw(each(dims, st.integers(1, (90, 16, 9)[dims - 1])))
    kernel = draw(each(dims, st.integers(1, (24, 7, 5)[dims - 1])))
    padding, dilation = draw(each(dims, st.integers(0, 6))), draw(each(dims, st.integers(1, 3)))
    groups = draw(st.sampled_from([1, 1, 1, 2, 3, 4, 8]))
    if groups >= 4:
        counts = (counts[0], 4 * groups, 4 * groups)
    elif groups > 1:
        counts = (counts[0], *(16 * groups * draw(st.integers(1, 2)) for _ in range(2)))
    # A stride over a dim of one tap is one, too.
    stride = tuple(draw(st.integers(1, 2)) if taps == 1 else 1 for taps in kernel)
    return Case(*counts, size, kernel, stride, padding, dilation, groups=groups)


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(
    case=cases(),
    layout=st.sampled_from(sorted(LAYOUTS)),
    strided=st.booleans(),
    activation=st.sampled_from(["none", "relu", "leaky_relu"]),
    isa_name=st.sampled_from(ISAS),
    seed=st.integers(0, 2**16),
)
def test_drawn_kernels(case, layout, strided, activation, isa_name, seed):
    assume(min(case.output_size) > 0)
    assume(way_of(case) == "pieces" or max(case.stride) > 1)
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
    assert_close(found, wanted, TOLERANCE)


@pytest.mark.parametrize("case", [*SOME, line(4, 48, 64, 300, 7, 3)], ids=str)
def test_threads_and_runs_change_no_bit(vectors, case):
    assert_same_bits_by_threads(case)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("which", [0, 3, 4], ids=["x", "bias", "residual"])
@pytest.mark.parametrize("case", SOME, ids=str)
def test_what_is_not_finite_is_the_vendors(vectors, case, which, value):
    """A transform spreads an infinity over its tile and turns it into NaN; a convolution's neighbours stay finite."""
    assert_not_finite_as_torch(case, which, value)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_zero_rows_and_gains(vectors, case):
    assert_zero_rows_and_gains(case, TOLERANCE)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_masks_nan_as_torch(vectors, case):
    assert_masks_nan_as_torch(case, TOLERANCE)


@pytest.mark.parametrize(
    "case",
    [
        line(2, 16, 16, 64, 7, 8),
        line(2, 16, 16, 64, 2, 1),
        line(2, 4, 16, 64, 7, 3),
        line(1, 64, 64, 30, 3, 16, 16),
        Case(2, 16, 16, (64,), (7,), (2,), (3,), (1,)),
        Case(2, 32, 64, (64,), (7,), (1,), (3,), (1,), groups=4),
        Case(2, 16, 16, (8, 8), (3, 3), (1, 1), (3, 1), (1, 1)),
        Case(2, 16, 16, (8, 8), (3, 1), (1, 1), (1, 1), (1, 1)),
        Case(2, 16, 32, (21, 6), (7, 1), (1, 2), (3, 0), (1, 1)),
        Case(1, 16, 16, (9, 6, 8), (3, 1, 1), (1, 1, 2), (1, 0, 0), (1, 1, 1)),
        Case(1, 16, 16, (9, 8, 6), (3, 1, 1), (1, 2, 1), (1, 0, 0), (1, 1, 1)),
        Case(1, 16, 16, (9, 8, 6), (1, 3, 1), (1, 1, 2), (0, 1, 0), (1, 1, 1)),
    ],
    ids=[
        "padding beyond the kernel",
        "2 taps",
        "thin",
        "short phases",
        "stride",
        "groups of 8 channels",
        "rows of padding",
        "padded columns",
        "strided columns of one tap",
        "three dims, strided columns",
        "three dims, strided rows",
        "rows, strided columns",
    ],
)
def test_what_is_summed_directly(case):
    assert way_of(case) == "direct"
    assert_close(*both(case, sample(case)), TOLERANCE)


def test_outputs_without_a_pixel_have_no_gradient_behind_a_relu():
    """Outputs in the padding alone are the bias, exactly: 0 here, where a ReLU passes nothing."""
    layer = wnfused.WNConv1d(16, 16, 7, padding=12, activation="relu")
    x = torch.randn(1, 16, 40, generator=torch.Generator().manual_seed(0))
    y = layer(x)
    assert not y[..., :6].any()
    dy = torch.zeros_like(y)
    dy[..., :6] = 1
    y.backward(dy)
    assert not layer.bias.grad.any()


def test_lengths_that_vary():
    """Audio comes in any length: the same layer, one call after another."""
    torch.manual_seed(0)
    layer = wnfused.WNConv1d(32, 32, 11, padding=15, dilation=3, activation="leaky_relu")
    for length in (1, 2, 3, 63, 64, 65, 127, 1000):
        x = torch.randn(1, 32, length)
        plain = torch.conv1d(x.double(), layer.weight.double(), layer.bias.double(), padding=15, dilation=3)
        wanted = torch.nn.functional.leaky_relu(plain, layer.negative_slope)
        torch.testing.assert_close(layer(x).double(), wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())

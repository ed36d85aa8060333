"""Convolutions in bfloat16 as products of pairs, by ``pair_window`` (csrc/cpu): on tiles, real or emulated, and by dot
products.
"""

from __future__ import annotations

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
    assert_not_finite_as_torch,
    assert_same_bits_by_threads,
    both,
    method_of,
    run,
    same3x3,
    sample,
    ways_of,
)

import wnfused
from wnfused.backends import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

ROUNDING = 2.0**-8
PAIRS = [isa for isa in ISAS if isa.startswith("amx") or isa == "avx512_bf16"]

CASES = [
    Case(2, 16, 32, (8, 9), (3, 3), (1, 1), (2, 1), (1, 1)),
    Case(1, 20, 23, (12, 7), (3, 3), (1, 1), (0, 1), (1, 1)),
    Case(3, 64, 48, (5, 3), (3, 3), (1, 1), (0, 2), (1, 1)),
    Case(9, 32, 32, (1, 1), (3, 3), (1, 1), (2, 2), (1, 1)),
    Case(2, 16, 32, (32, 16), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(2, 48, 80, (9, 11), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(2, 16, 32, (9, 11), (1, 1), (2, 2), (0, 0), (1, 1)),  # grids that meet no tap
    Case(70, 40, 24, (1, 1), (1, 1), (1, 1), (0, 0), (1, 1)),
    Case(2, 72, 40, (9, 8), (1, 1), (1, 1), (0, 0), (1, 1)),
    Case(2, 3, 20, (13, 12), (7, 7), (2, 2), (3, 3), (1, 1)),  # thin
    Case(2, 7, 33, (13, 12), (3, 5), (1, 3), (1, 0), (2, 1)),
    Case(1, 24, 5, (10, 12), (3, 3), (1, 2), (2, 2), (1, 2)),  # thin backward; taps apart
    Case(1, 16, 16, (10, 12), (4, 2), (3, 3), (2, 1), (1, 3)),
    Case(1, 300, 200, (4, 4), (3, 3), (1, 1), (0, 2), (1, 1)),  # each worker its own outputs
    Case(2, 16, 24, (700,), (7,), (1,), (3,), (1,)),  # lines in several chunks
    Case(1, 2, 16, (1300,), (9,), (2,), (4,), (1,)),
    Case(37, 24, 40, (3, 4), (3, 3), (2, 2), (1, 1), (1, 1)),  # several images at once
    Case(70, 7, 20, (3, 3), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(150, 18, 16, (2, 2), (2, 1), (1, 1), (1, 0), (1, 1)),
    Case(33, 20, 24, (2, 3), (4, 4), (2, 2), (1, 1), (1, 1), transposed=True),
    Case(1, 24, 16, (40, 300), (3, 3), (1, 1), (2, 2), (1, 1)),
    Case(2, 24, 20, (9, 7), (4, 4), (2, 2), (1, 1), (1, 1), transposed=True),
    Case(1, 20, 40, (21,), (16,), (8,), (4,), (1,), transposed=True),
    Case(2, 5, 48, (6, 9), (3, 3), (1, 2), (1, 0), (2, 1), transposed=True, output_padding=(1, 1)),
    Case(1, 64, 3, (9, 8), (3, 3), (2, 3), (1, 2), (1, 1), transposed=True),
    Case(2, 130, 400, (4, 3), (4, 4), (2, 2), (1, 1), (1, 1), transposed=True),
    Case(1, 3, 64, (56, 56), (3, 3), (2, 2), (1, 1), (1, 1)),  # thin, and enough of it for several threads
]


@pytest.fixture(params=PAIRS)
def pairs(request):
    torch.ops.wnfused_native.set_cpu_isa(request.param)
    yield request.param
    torch.ops.wnfused_native.set_cpu_isa("auto")


def in_bfloat16(tensors):
    x, *parts, residual = tensors
    return [x.bfloat16(), *parts, None if residual is None else residual.bfloat16()]


def all_in_bfloat16(tensors):
    return [None if t is None else t.bfloat16() for t in tensors]


def assert_rounded(found, wanted, tolerance=ROUNDING, parameters=torch.float32):
    """To what rounding w, dz and the results to bfloat16 costs."""
    dtypes = dict.fromkeys(("y", "dx", "dz"), torch.bfloat16) | dict.fromkeys(("dv", "dg", "db"), parameters)
    for name in NAMES:
        actual, expected = found[name], wanted[name]
        assert actual.shape == expected.shape, name
        if expected.numel() == 0:
            continue
        assert actual.dtype == dtypes.get(name, torch.float32), name
        # A gradient of a row of few entries is what is left of larger ones; dg's and dv's are those of dW.
        scale = expected.norm() + (wanted["dg"].norm() + wanted["db"].norm()) * (name in ("dv", "dg", "db"))
        error = (actual.double() - expected).norm() / scale.clamp_min(1e-3)
        assert error <= tolerance, f"{name}: {error:.2e}"


def gradient_of(case):
    """The layer's tensors, and dy."""
    tensors = in_bfloat16(sample(case))
    return tensors, torch.randn_like(tensors[4])


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(pairs, case, layout):
    assert method_of(case, bfloat16=True) == "pairs"
    for activation in ("none", "relu", "leaky_relu"):
        found, wanted = both(case, in_bfloat16(sample(case, layout)), activation)
        assert_rounded(found, wanted)
    if len(case.size) == 2:
        assert found["y"].stride() == torch.convolution(*sample(case, layout)[:2], None, *case.geometry).stride()
    assert found["dv"].stride() == sample(case, layout)[1].stride()


@pytest.mark.parametrize("case", [*CASES[1:3], CASES[5], *CASES[7:13], CASES[13], *CASES[21:]], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_in_bfloat16(pairs, case, layout):
    """They are read, and their gradients written, as they are."""
    for activation in ("none", "relu"):
        found, wanted = both(case, all_in_bfloat16(sample(case, layout)), activation)
        assert_rounded(found, wanted, 2 * ROUNDING, torch.bfloat16)
    assert found["dv"].stride() == sample(case, layout)[1].stride()


THIN = [
    Case(2, 3, 20, (13, 12), (7, 7), (2, 2), (3, 3), (1, 1)),
    Case(2, 3, 32, (12, 12), (5, 5), (2, 2), (2, 2), (1, 1)),
    Case(2, 5, 64, (9, 9), (3, 3), (1, 1), (1, 1), (1, 1)),
    Case(1, 7, 24, (9, 9), (2, 2), (1, 1), (0, 0), (1, 1)),
    Case(1, 4, 24, (9, 9), (3, 4), (1, 1), (0, 0), (1, 1)),
    Case(2, 40, 5, (9, 9), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(2, 24, 3, (9, 9), (5, 5), (2, 2), (2, 2), (1, 1), transposed=True),
    Case(2, 3, 40, (9, 9), (7, 7), (2, 2), (2, 2), (1, 1), transposed=True),
]


@pytest.mark.parametrize("case", THIN, ids=str)
def test_thin_layers_do_not_meet_what_lay_in_their_scratch_memory(pairs, case):
    """It is full of NaN here. A layer that met one would be right, by the vendor's convolution, and slow."""
    assert method_of(case, bfloat16=True) != "vendor"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        both_passes = run(native.conv, native.conv_backward, case, *gradient_of(case), "relu")
    assert both_passes["y"].isfinite().all()
    assert not [event.key for event in profile.key_averages() if "aten::" in event.key and "conv" in event.key]


SAME = [same3x3(2, 16, 32, 8, 9), same3x3(1, 20, 23, 12, 7), same3x3(3, 64, 48, 5, 3), same3x3(9, 32, 32, 1, 1),
        same3x3(1, 300, 200, 4, 4), same3x3(1, 24, 16, 40, 300)]  # fmt: skip


@pytest.mark.parametrize("case", SAME, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_that_keep_the_size_of_their_map(pairs, case, layout):
    """On tiles; by dot products Winograd's method in float32 saves more."""
    taken = method_of(case, bfloat16=True) == "pairs"
    assert taken == (pairs != "avx512_bf16" and case.size != (1, 1))
    for activation in ("none", "relu", "leaky_relu"):
        assert_rounded(*both(case, in_bfloat16(sample(case, layout)), activation))
    if taken:  # a wide layer on few pixels is a linear one otherwise
        assert_same_bits_by_threads(case, in_bfloat16)


@pytest.mark.parametrize("counts", [(1, 512, 128, (7, 7)), (2, 330, 90, (3, 4)), (1, 33, 800, (5, 5))], ids=str)
@pytest.mark.parametrize("prepared", [in_bfloat16, all_in_bfloat16])
def test_pixels_that_are_rows_are_those_of_a_linear_layer(pairs, counts, prepared):
    if pairs == "avx512_bf16":
        pytest.skip("on tiles alone")
    case = Case(*counts, (1, 1), (1, 1), (0, 0), (1, 1))
    assert ways_of(case, last=True, bfloat16=True) == ("unfolded", "unfolded")
    parameters = prepared(sample(case))[1].dtype
    tolerance = ROUNDING * (1 if parameters == torch.float32 else 2)
    for activation in ("none", "relu", "leaky_relu"):
        tensors = prepared(sample(case, "last"))
        found, wanted = both(case, tensors, activation)
        assert_rounded(found, wanted, tolerance, parameters)
        assert all(is_last(found[name]) for name in ("y", "dx"))
        # Maps in NCHW beside an x in channels_last.
        tensors[4] = tensors[4].contiguous()
        dy = torch.randn(found["y"].shape, generator=torch.Generator().manual_seed(9)).bfloat16()
        again = run(native.conv, native.conv_backward, case, tensors, dy, activation)
        assert all(torch.equal(again[name], found[name]) for name in NAMES if found[name].numel())


@pytest.mark.parametrize("which", [0, 3, 4], ids=["x", "bias", "residual"])
def test_a_row_that_is_not_finite_stays_by_itself(pairs, which):
    for value in (float("inf"), float("nan")):
        assert_not_finite_as_torch(
            Case(1, 512, 128, (7, 7), (1, 1), (1, 1), (0, 0), (1, 1)), which, value, rows_in_half
        )


def is_last(t):
    return t.is_contiguous(memory_format=torch.channels_last)


def rows_in_half(tensors):
    return [t.to(torch.bfloat16, memory_format=torch.channels_last) if t.dim() == 4 else t for t in tensors]


@pytest.mark.parametrize(
    ("case", "takes_dots"),
    [
        (Case(70, 32, 24, (2, 2), (3, 3), (2, 2), (1, 1), (1, 1)), True),
        (Case(40, 32, 24, (4, 3), (4, 3), (1, 1), (0, 0), (1, 1)), True),  # backward into padding
        (Case(40, 32, 24, (1, 1), (4, 4), (1, 1), (0, 0), (1, 1), transposed=True), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_of_one_pixel(pairs, case, takes_dots, layout):
    assert (method_of(case, bfloat16=True) == "pairs") == (takes_dots and pairs == "avx512_bf16")
    for activation in ("none", "leaky_relu"):
        assert_rounded(*both(case, in_bfloat16(sample(case, layout)), activation))


@pytest.mark.parametrize("needs", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 1, 1, 1), (1, 1, 0, 1)], ids=str)
@pytest.mark.parametrize("case", CASES[:1] + CASES[5:6] + CASES[9:10], ids=str)
def test_gradients_that_are_needed(pairs, case, needs):
    for activation in ("none", "relu"):
        found, wanted = both(case, in_bfloat16(sample(case)), activation, [bool(n) for n in needs])
        assert_rounded(found, wanted)


@pytest.mark.parametrize("case", CASES[1:3] + CASES[5:6] + CASES[9:20] + CASES[-1:], ids=str)
def test_the_same_bits_for_any_number_of_threads(pairs, case):
    assert_same_bits_by_threads(case, in_bfloat16)


@pytest.mark.parametrize("which", [0, 3, 4], ids=["x", "bias", "residual"])
@pytest.mark.parametrize("case", CASES[:2] + CASES[5:6] + CASES[9:10] + CASES[14:15], ids=str)
def test_what_is_not_finite_is_the_vendors(pairs, case, which):
    for value in (float("inf"), float("nan")):
        assert_not_finite_as_torch(case, which, value, in_bfloat16)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.tuples(st.integers(1, 4) | st.integers(5, 80), st.integers(1, 70), st.integers(1, 70)),
    size=st.lists(st.integers(1, 40), min_size=1, max_size=2),
    kernel=st.lists(st.integers(1, 7), min_size=2, max_size=2),
    stride=st.lists(st.integers(1, 3), min_size=2, max_size=2),
    padding=st.lists(st.integers(0, 3), min_size=2, max_size=2),
    dilation=st.lists(st.integers(1, 3), min_size=2, max_size=2),
    transposed=st.booleans(),
    layout=st.sampled_from(sorted(LAYOUTS)),
    strided=st.booleans(),
    activation=st.sampled_from(["none", "relu", "leaky_relu"]),
    isa=st.sampled_from(PAIRS),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_drawn_layers(
    counts, size, kernel, stride, padding, dilation, transposed, layout, strided, activation, isa, seed
):  # fmt: skip
    dims = len(size)
    window = [tuple(extents[:dims]) for extents in (kernel, stride, padding, dilation)]
    case = Case(*counts, tuple(size), *window, transposed)
    assume(all(n >= 1 for n in case.output_size))
    assume(case.inputs * window[0][0] * window[0][-1] > 2)
    # Of many images small ones; neither one pixel, which tiles leave, nor what meets the padding mostly.
    before, after = math.prod(size), math.prod(case.output_size)
    assume(counts[0] < 5 or before < 40)
    assume(min(before, after) > 1 or math.prod(window[0]) == 1)
    assume(not transposed or after < 3 * before * math.prod(window[1]))
    tensors = in_bfloat16(sample(case, layout, seed))
    if strided:
        tensors[0] = tensors[0].mT.contiguous().mT
        tensors[4] = torch.stack([tensors[4]] * 2, -1).flatten(-2)[..., ::2]
    torch.ops.wnfused_native.set_cpu_isa(isa)
    try:
        # Dot products leave what Winograd's method suits to float32.
        keeps_size = len(size) == 2 and window == [(3, 3), (1, 1), (1, 1), (1, 1)] and not transposed
        assert method_of(case, bfloat16=True) == "pairs" or (keeps_size and isa == "avx512_bf16")
        found, wanted = both(case, tensors, activation)
    finally:
        torch.ops.wnfused_native.set_cpu_isa("auto")
    # Sums of few terms may cancel.
    assert_rounded(found, wanted, 4 * ROUNDING)


def test_banks_are_kept_beside_those_of_float32(pairs):
    layer = wnfused.WNConv2d(230, 219, 3, padding=2, activation="relu")
    xs = [torch.randn(1, 230, 9, n) for n in (8, 9, 8)]

    def half(x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    with torch.no_grad():
        expected = [(layer(x), half(x)) for x in xs]
        with wnfused.frozen(layer):
            for x, (single, rounded) in zip(xs, expected, strict=True):
                assert torch.equal(half(x), rounded)
                torch.testing.assert_close(layer(x), single, rtol=1e-5, atol=1e-4)
            assert len(layer._frozen.banks) == 2

"""3x3 layers that the C++ kernels take from the vendor's library: every method and instruction set against float64.

Winograd's transforms lose two to three times as much as a direct sum, so bounds are those of the other layers times
four.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
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
    run,
    same3x3,
    sample,
    way_of,
)

from wnfused import reference
from wnfused.backends import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

TOLERANCE = 256 * 2.0**-24

# (images, inputs, outputs, size) by method: whole and ragged blocks of 16 channels, more of them in than out
# and the other way, maps that tiles cover and that they do not, panels that are full and that are not, weights that are
# packed group by group for one panel and for several.
SHAPES = {
    "direct": [
        (1, 16, 16, 3, 3),
        (17, 16, 32, 2, 2),
        (1, 40, 36, 3, 3),
        (40, 35, 12, 2, 3),
        (2, 16, 16, 1, 5),
        (1, 20, 16, 2, 3, 3),
    ],
    "winograd2": [
        (1, 64, 64, 5, 8),
        (3, 32, 16, 6, 5),
        (1, 12, 23, 6, 6),
        (2, 16, 32, 3, 6, 5),
        (2, 128, 132, 2, 4, 4),
    ],
    "winograd4": [
        (1, 16, 16, 32, 32),
        (2, 24, 40, 9, 13),
        (5, 32, 16, 8, 8),
        (1, 80, 16, 11, 12),
        (3, 16, 48, 12, 7),
        (2, 16, 16, 5, 8, 8),
        (1, 40, 24, 2, 9, 13),
        (3, 16, 32, 1, 11, 12),
        (3, 256, 270, 13, 10),
        (8, 272, 250, 9, 9),
        (2, 160, 144, 6, 8, 9),
        (4, 128, 128, 1, 7, 7),
    ],
}
CASES = [(method, same3x3(*shape)) for method, shapes in SHAPES.items() for shape in shapes]
CASES.append(("winograd4", Case(2, 24, 16, (3, 8, 9), (1, 3, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1))))
THREE_DIMS = same3x3(2, 32, 48, 3, 8, 7)
# A block in and out, more of either, an odd number of them, banks of a group that a cache has no room for, several
# slices of a weight gradient, levels that are as images; two groups and four that have a block in common, or several
# blocks, or what there is of them.
GROUPS = [
    ("winograd4", same3x3(2, 64, 64, 14, 14)._replace(groups=4)),
    ("winograd4", same3x3(1, 64, 128, 9, 13)._replace(groups=2)),
    ("winograd4", same3x3(9, 96, 48, 7, 8)._replace(groups=3)),
    ("winograd4", same3x3(1, 192, 96, 12, 11)._replace(groups=2)),
    ("winograd4", same3x3(2, 160, 320, 12, 12)._replace(groups=2)),
    ("winograd4", same3x3(5, 32, 32, 29, 28)._replace(groups=2)),
    ("winograd4", Case(2, 32, 64, (3, 8, 9), (1, 3, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1), groups=2)),
    ("winograd2", same3x3(2, 64, 32, 6, 5)._replace(groups=2)),
    ("winograd4", same3x3(2, 64, 64, 14, 13)._replace(groups=8)),
    ("winograd4", same3x3(1, 32, 32, 29, 8)._replace(groups=8)),
    ("winograd4", same3x3(2, 96, 96, 14, 13)._replace(groups=4)),
    ("winograd4", same3x3(9, 80, 80, 9, 8)._replace(groups=2)),
    ("winograd4", same3x3(3, 48, 48, 12, 29)._replace(groups=4)),
    ("winograd4", same3x3(1, 240, 240, 13, 16)._replace(groups=2)),
    ("winograd2", same3x3(2, 112, 112, 7, 6)._replace(groups=2)),
    ("winograd4", same3x3(2, 72, 72, 14, 13)._replace(groups=3)),
    ("winograd4", same3x3(1, 360, 360, 17, 24)._replace(groups=3)),
    ("winograd4", same3x3(12, 60, 60, 9, 8)._replace(groups=3)),
    ("winograd4", same3x3(7, 280, 280, 8, 12)._replace(groups=7)),
    ("winograd2", same3x3(2, 120, 120, 6, 7)._replace(groups=5)),
    ("winograd4", same3x3(3, 56, 56, 13, 12)._replace(groups=7)),
    ("winograd4", same3x3(3, 60, 60, 13, 12)._replace(groups=5)),
    ("winograd4", same3x3(5, 40, 40, 17, 12)._replace(groups=10)),
]
CASES += GROUPS
SOME = [*(same3x3(*shapes[1]) for shapes in SHAPES.values()), THREE_DIMS, *(GROUPS[i][1] for i in (1, 2, -2, -1))]


@pytest.mark.parametrize(("method", "case"), CASES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_method_and_layout(vectors, method, case, layout):
    assert way_of(case) == method
    tensors = sample(case, layout)
    assert_layouts_agree(case, tensors, TOLERANCE)


@pytest.mark.parametrize("case", [case for _, case in CASES], ids=str)
@pytest.mark.parametrize("layout", ["nchw", "last"])
def test_layers_do_not_meet_what_lay_in_their_scratch_memory(case, layout):
    """It is full of NaN here. A layer that met one would be right, by the vendor's convolution, and slow."""
    *tensors, residual = sample(case, layout)
    dy = torch.ones_like(residual)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = run(native.conv, native.conv_backward, case, [*tensors, residual], dy, "relu")
    assert all(t is None or t.isfinite().all() for t in found.values())
    assert not [event.key for event in profile.key_averages() if "aten::" in event.key and "conv" in event.key]


@pytest.mark.parametrize(
    "case",
    [*(same3x3(*shapes[0]) for shapes in SHAPES.values()), THREE_DIMS, GROUPS[0][1], GROUPS[-2][1]],
    ids=str,
)
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4)), ids=str)
def test_only_what_is_needed(needs, case):
    assert_only_what_is_needed(case, needs, TOLERANCE)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.tuples(st.integers(1, 5), st.integers(8, 40), st.integers(8, 40)),
    groups=st.sampled_from([1, 1, 2, 3, 8]),
    size=st.lists(st.integers(1, 14), min_size=2, max_size=3),
    layout=st.sampled_from(sorted(LAYOUTS)),
    strided=st.booleans(),
    activation=st.sampled_from(["none", "relu", "leaky_relu"]),
    isa_name=st.sampled_from(ISAS),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_drawn_shapes(counts, groups, size, layout, strided, activation, isa_name, seed):
    if groups == 8:
        counts = (counts[0], *[32 if counts[1] < 16 else 64] * 2)
    elif groups > 1:
        counts = (counts[0], *(count // 8 * 16 * groups for count in counts[1:]))
    case = same3x3(*counts, *size)._replace(groups=groups)
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


@pytest.mark.parametrize("case", SOME, ids=str)
def test_threads_and_runs_change_no_bit(vectors, case):
    assert_same_bits_by_threads(case)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("which", [0, 1, 3, 4], ids=["x", "v", "bias", "residual"])
@pytest.mark.parametrize("case", SOME, ids=str)
def test_what_is_not_finite_is_the_vendors(vectors, case, which, value):
    """A transform spreads an infinity over its tile and turns it into NaN; a convolution's neighbours stay finite."""
    assert_not_finite_as_torch(case, which, value)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_gradients_that_are_not_finite(vectors, case):
    x, v, g, bias, _ = sample(case)
    y, norm = native.conv(x, v, g, bias, None, *case.geometry, 0, "none")
    dy = torch.randn_like(y)
    dy.view(-1)[3] = float("inf")
    dx, dv, dg, db, _ = native.conv_backward(dy, y, x, v, g, norm, [True] * 4, *case.geometry, 0, "none")
    wide = (t.double() for t in (dy, y, x, v, g, norm))
    wanted_dx, wanted_dv, *_ = reference.conv_backward(*wide, [True] * 4, *case.geometry, 0, "none")
    assert torch.equal(dx.isfinite(), wanted_dx.isfinite())
    assert torch.equal(dv.isfinite(), wanted_dv.isfinite())
    assert not dg[0].isfinite()
    assert db[0] == float("inf")


def test_zero_rows_and_gains(vectors):
    for case in SOME:
        assert_zero_rows_and_gains(case, TOLERANCE)


def test_masks_nan_as_torch(vectors):
    for case in SOME:
        assert_masks_nan_as_torch(case, TOLERANCE)


@pytest.mark.parametrize(
    "shape",
    [
        (0, 16, 16, 8, 8),
        (1, 16, 16, 0, 8),
        (0, 0, 0, 0, 0),
        (64, 64, 64, 512, 512),
    ],
    ids=str,
)
def test_what_is_left_to_the_vendor(shape):
    """No images; copies of more than 1 GB."""
    assert way_of(same3x3(*shape)) == "vendor"


def test_mostly_padding(vectors):
    """By AVX2 kernels leave half of a block out, and take it."""
    assert way_of(same3x3(1, 16, 1, 32, 32)) == ("winograd4" if vectors == "avx2" else "vendor")
    assert way_of(same3x3(8, 2, 2, 16, 16)) == ("direct" if vectors == "avx2" else "vendor")


def test_weights_too_many_to_be_packed_for_a_small_volume(vectors):
    """Bundle by bundle, in a cache, any number is worth packing."""
    assert way_of(same3x3(1, 512, 512, 5, 8, 8)) == ("vendor" if vectors == "portable" else "winograd4")


def test_errors_are_a_few_times_those_of_a_direct_sum():
    case = same3x3(2, 64, 64, 32, 32)
    tensors = sample(case)
    tensors[3:] = [None, None]
    found, wanted = both(case, tensors, "none")
    scale = tensors[2] / tensors[1].flatten(1).norm(dim=1)
    w = scale[:, None, None, None] * tensors[1]
    direct = torch.nn.functional.conv2d(tensors[0], w, padding=1)
    error, usual = ((y.double() - wanted["y"]).norm() for y in (found["y"], direct))
    assert error <= 8 * usual

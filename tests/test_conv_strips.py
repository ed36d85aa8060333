"""Convolutions with few channels on a side, or in a group: vectorised over pixels."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from own_conv import (
    Case,
    assert_close,
    assert_layouts_agree,
    assert_masks_nan_as_torch,
    assert_not_finite_as_torch,
    assert_only_what_is_needed,
    assert_same_bits_by_threads,
    assert_zero_rows_and_gains,
    both,
    channels_last,
    go_by,
    sample,
    ways_of,
)

from wnfused.backends import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

TOLERANCE = 32 * 2.0**-24


def layer(images, inputs, outputs, size, kernel, *, stride=1, padding=0, dilation=1, **others) -> Case:
    every = (n if isinstance(n, tuple) else (n,) * len(size) for n in (kernel, stride, padding, dilation))
    return Case(images, inputs, outputs, size, *every, **others)


def transposed(*counts, extra=(0, 0), **window) -> Case:
    return layer(*counts, **window, transposed=True, output_padding=extra)


CASES = {
    "first layer": layer(2, 3, 14, (11, 13), 3, padding=1),
    "first layer of many strips": layer(3, 1, 8, (40, 70), 3, padding=1),
    "first layer by 2": layer(2, 3, 17, (21, 18), 7, stride=2, padding=3),
    "first layer by 2, long lines": layer(1, 3, 9, (20, 140), 7, stride=2, padding=3),
    "first layer by 4, taps as wide": layer(2, 3, 7, (16, 21), 4, stride=4),
    "first layer of a signal": layer(2, 1, 20, (500,), 7, padding=3),
    "first layer of a signal by 8": layer(2, 2, 9, (413,), 16, stride=8, padding=4),
    "last layer": layer(2, 37, 3, (12, 9), 3, padding=1),
    "last layer of six": layer(3, 40, 6, (9, 5), 3, padding=1),
    "last layer of wide taps": layer(1, 20, 1, (17, 30), 7, padding=3),
    "last layer of one window": layer(7, 40, 2, (4, 4), 4),
    "last layer of a signal": layer(1, 33, 1, (700,), 7, padding=3),
    "last layer by 2": layer(2, 30, 4, (15, 14), 3, stride=2, padding=1),
    "one tap": layer(3, 24, 5, (9, 7), 1),
    "one tap over three dims": layer(2, 24, 3, (4, 5, 6), 1),
    "one tap over three dims, few inputs": layer(3, 2, 3, (3, 7, 6), 1),
    "one tap over three dims, groups": layer(2, 15, 10, (3, 7, 6), 1, groups=5),
    "one tap by 3": layer(2, 24, 5, (20, 23), 1, stride=3),
    "one tap, more padding than taps": layer(2, 8, 5, (6, 5), 1, padding=2),
    "groups of four": layer(3, 24, 24, (10, 14), 3, padding=1, groups=6),
    "groups of many strips": layer(2, 12, 30, (50, 61), 3, padding=1, groups=6),
    "groups of 5, by 2": layer(2, 20, 40, (13, 16), 3, stride=2, padding=1, groups=4),
    "groups of one input": layer(2, 9, 27, (8, 9), 3, padding=1, groups=9),
    "groups of 22": layer(2, 44, 44, (9, 8), 3, padding=1, groups=2),
    "groups of a signal, many taps": layer(2, 16, 32, (300,), 41, stride=4, padding=20, groups=4),
    "dilation": layer(2, 4, 10, (19, 23), 3, padding=(2, 6), dilation=(2, 3)),
    "dilation and stride": layer(2, 4, 6, (23, 40), (3, 4), stride=(2, 3), padding=(3, 2), dilation=(3, 2)),
    "no padding": layer(2, 5, 11, (9, 31), (2, 3)),
    "columns alone": layer(2, 2, 13, (4, 100), (1, 5), padding=(0, 2)),
    "rows alone, of narrow lines": layer(2, 1, 11, (90, 5), (5, 1), stride=(3, 1), padding=(2, 0)),
    "a stride beyond the taps": layer(2, 3, 5, (14, 15), 2, stride=3, padding=1),
    "a stride beyond the map": layer(2, 3, 6, (2, 9), 3, stride=(4, 2), padding=1),
    "more padding than taps": layer(2, 3, 6, (5, 6), 2, padding=3),
    "one pixel": layer(5, 20, 2, (1, 1), 3, padding=1),
    "transposed last layer by 2": transposed(2, 30, 3, (7, 9), 4, stride=2, padding=1),
    "transposed last layer": transposed(2, 21, 1, (10, 30), 3, padding=1),
    "transposed, more output": transposed(2, 20, 2, (5, 8), 3, stride=(2, 3), padding=(1, 0), extra=(1, 2)),
    "transposed, a stride beyond the taps": transposed(2, 19, 4, (9, 8), 2, stride=3),
    "transposed first layer": transposed(3, 3, 20, (6, 7), (3, 5), stride=(1, 2), padding=1, dilation=(2, 1)),
    "transposed signal by 8": transposed(1, 40, 1, (60,), 16, stride=8, padding=4),
    "transposed last layer of many strips": transposed(2, 40, 3, (24, 24), 4, stride=2, padding=1),
    "transposed to many": transposed(2, 4, 20, (9, 9), 3, padding=1),
    "one target": layer(9, 1, 1, (8, 8), 3, padding=1),
    "over one level": layer(2, 3, 8, (1, 9, 11), (1, 3, 3), padding=(0, 1, 1)),
}
VENDORS_FORWARD = {"first layer by 2"}
SHORT_LINES = {"last layer of one window", "one pixel"}  # by AVX2 there is another way for one output or two


def has_strips(vectors: str, name: str) -> bool:
    return vectors != "portable" and not (vectors == "avx2" and name in SHORT_LINES)


def products_of(case: Case) -> int:
    """Multiply-adds of a pass."""
    pixels = case.size if case.transposed else case.output_size
    return case.images * math.prod((*pixels, *case.kernel, case.inputs, case.outputs)) // case.groups


@pytest.mark.parametrize("name", CASES)
def test_every_geometry(vectors, name):
    case = CASES[name]
    strips = has_strips(vectors, name)
    assert go_by("strips", case) == (strips and name not in VENDORS_FORWARD, strips)
    assert_layouts_agree(case, sample(case), TOLERANCE)


def test_which_layers_go_this_way():
    if torch.ops.wnfused_native.cpu_isa() == "portable":
        pytest.skip("no kernels of strips")
    both_ways, neither, backward = (True, True), (False, False), (False, True)
    assert go_by("strips", layer(1, 3, 64, (224, 224), 7, stride=2, padding=3)) == both_ways
    assert go_by("strips", layer(1, 3, 64, (100, 100), 7, stride=2, padding=3)) == backward
    assert go_by("strips", layer(1, 64, 3, (32, 32), 3, padding=1)) == both_ways
    assert go_by("strips", layer(8, 128, 128, (32, 32), 3, padding=1, groups=32)) == both_ways
    assert go_by("strips", layer(1, 16, 16, (32, 32), 3, padding=1)) == neither
    assert go_by("strips", layer(64, 6, 12, (12, 12), 5)) == both_ways
    assert go_by("strips", layer(64, 3, 64, (16, 16), 14)) == neither  # nine windows among 256 places
    assert go_by("strips", layer(1, 1, 14, (9, 9), 5)) == both_ways  # 41 places, as nothing follows the last image
    assert go_by("strips", layer(64, 64, 4, (4, 4), 3, padding=1)) == neither  # short lines, and another way
    alone = torch.ops.wnfused_native.cpu_isa() != "avx2"
    assert go_by("strips", layer(64, 64, 1, (4, 4), 3, padding=1)) == (both_ways if alone else neither)
    assert go_by("strips", layer(64, 64, 4, (3, 3), 1)) == both_ways  # all pixels of an image side by side
    assert go_by("strips", layer(64, 64, 4, (2, 2), 1)) == neither
    assert go_by("strips", layer(1, 3, 192, (224, 224), 16, stride=16)) == neither
    assert go_by("strips", layer(1, 64, 64, (32, 32), 3, padding=1, groups=64)) == neither
    assert go_by("strips", layer(1, 64, 64, (32, 32), 3, padding=1, groups=2)) == neither
    assert go_by("strips", layer(1, 3, 8, (4, 4, 4), 3, padding=1)) == neither
    assert go_by("strips", layer(0, 3, 8, (4, 4), 3, padding=1)) == neither
    images = backward if torch.ops.wnfused_native.cpu_isa() != "avx2" else both_ways
    assert go_by("strips", layer(8, 3, 64, (64, 64), 3, padding=1)) == images
    assert go_by("strips", layer(1, 1, 32, (28, 28), 5, padding=2)) == images
    assert go_by("strips", layer(8, 3, 32, (64, 64), 5, padding=2)) == both_ways  # many taps on a large map
    assert go_by("strips", layer(2, 12, 48, (9, 9), 1)) == (neither if images == backward else backward)


def test_taps_further_apart_than_a_cache_is_large(vectors):
    """Each strip would need all of the map: such a layer is another way's."""
    case = layer(1, 20, 1, (263_000,), 2, dilation=2**18)
    assert all(go_by("strips", case)) == (vectors != "portable")
    assert_close(*both(case, sample(case)), TOLERANCE)


@pytest.mark.parametrize(
    "case", [layer(1, 8500, 3, (5, 7), 1), transposed(1, 8500, 2, (3, 5), 2, stride=2)], ids=["one tap", "transposed"]
)
def test_more_channels_than_a_cache_has_room_for(vectors, case):
    """Of a single place: a strip is as wide as its kernels need all the same."""
    assert all(go_by("strips", case)) == (vectors != "portable")
    assert_close(*both(case, sample(case)), 4 * TOLERANCE)  # sums of 8,500 products


BACKWARD_IN_CHANNELS_LAST = {"first layer by 2"}
ELSEWHERE_IN_CHANNELS_LAST = {
    "last layer by 2", "one tap", "one tap over three dims",
    "one tap over three dims, groups", "one tap by 3", "one tap, more padding than taps", "groups of four",
    "groups of many strips", "groups of 5, by 2", "groups of one input", "groups of 22", "transposed first layer",
    "transposed to many",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case.size) > 1])
def test_channels_last(vectors, name):
    case = CASES[name]
    backward = has_strips(vectors, name) and name not in ELSEWHERE_IN_CHANNELS_LAST
    assert go_by("strips", case, last=True) == (backward and name not in BACKWARD_IN_CHANNELS_LAST, backward)
    # The vendor's own gradient of the weight, by AVX2, is off by up to 1.5e-6, and dg from it by up to 2.1e-6.
    is_vendors = ways_of(case, last=True)[1] == "vendor"
    assert_layouts_agree(case, sample(case, "last"), TOLERANCE * (2 if is_vendors else 1))


@pytest.mark.parametrize("layout", ["last map", "last weight"])
@pytest.mark.parametrize("name", ["first layer of many strips", "last layer", "groups of four"])
def test_one_of_two_in_channels_last(vectors, name, layout):
    assert_layouts_agree(CASES[name], sample(CASES[name], layout), TOLERANCE)


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4)), ids=str)
@pytest.mark.parametrize("name", ["first layer by 2", "last layer", "groups of four", "transposed last layer by 2"])
def test_only_what_is_needed(name, needs):
    assert_only_what_is_needed(CASES[name], needs, TOLERANCE)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dims = draw(st.integers(1, 2))

    def each(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(least, most)) for _ in range(dims))

    is_transposed = draw(st.integers(0, 3)) == 0
    groups = 1 if is_transposed else draw(st.sampled_from([1, 1, 2, 3]))
    few, many = draw(st.integers(1, 6)), draw(st.integers(1, 12 if groups > 1 else 40))
    inputs, outputs = (few, many) if draw(st.booleans()) else (many, few)
    kernel, stride, dilation = each(1, 7), each(1, 3), each(1, 3)
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    padding = tuple(draw(st.integers(0, (r - 1) // 2 if is_transposed else r)) for r in reach)
    size = tuple(draw(st.integers(max(1, r - 2 * p), 60)) for r, p in zip(reach, padding, strict=True))
    extra = tuple(draw(st.integers(0, s - 1)) for s in stride) if is_transposed else (0,) * dims
    counts = (draw(st.integers(1, 5)), groups * inputs, groups * outputs)
    return Case(*counts, size, kernel, stride, padding, dilation, is_transposed, extra, groups)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    case=cases(),
    activation=st.sampled_from(["none", "relu", "leaky_relu"]),
    layout=st.sampled_from(["nchw", "last", "last map", "last weight"]),
)
def test_drawn_layers(vectors, case, activation, layout):
    tensors = sample(case, layout)
    found, wanted = both(case, tensors, activation)
    if tensors[1][0].numel() == 1:  # the direction of one number has no gradient
        found["dv"], wanted["dv"] = found["dv"] * 0, wanted["dv"] * 0
    few = case.outputs <= 6  # whose sums may all cancel
    assert_close(found, wanted, 16 * TOLERANCE if few else TOLERANCE)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("name", ["first layer by 2", "last layer", "groups of four", "transposed last layer by 2"])
def test_values_that_are_not_finite(name, which, value):
    assert_not_finite_as_torch(CASES[name], which, value)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["first layer", "last layer by 2", "groups of four"])
def test_gradients_that_are_not_finite(vectors, name, value):
    """Padding has no part in them, as with torch."""
    case = CASES[name]
    tensors = sample(case)
    y = native.conv(*tensors, *case.geometry, 0, "none", 0.1)[0]
    dy = torch.randn_like(y)
    dy[0, 0].view(-1)[0] = value
    with torch.no_grad():
        norm = torch.linalg.vector_norm(tensors[1].flatten(1), dim=1)
        w = (tensors[2] / norm).view(-1, *(1,) * (tensors[1].dim() - 1)) * tensors[1]
    window = (list(case.stride), list(case.padding), list(case.dilation), False, [0] * len(case.size), case.groups)
    dx, dw, db = torch.ops.aten.convolution_backward(dy, tensors[0], w, [case.outputs], *window, [True] * 3)
    found = native.conv_backward(dy, y, *tensors[:3], norm, [True] * 4, *case.geometry, 0, "none", 0.1)
    assert torch.equal(found[0].isfinite(), dx.isfinite())
    rows = dw.flatten(1).isfinite().all(1)  # dv of a row holds the whole row's dw
    assert torch.equal(found[1].flatten(1).isfinite().all(1), rows)
    assert torch.equal(found[2].flatten().isfinite(), rows)
    assert torch.equal(found[3].isfinite(), db.isfinite())


def test_masks_of_nan():
    assert_masks_nan_as_torch(CASES["last layer"], TOLERANCE)


@pytest.mark.parametrize("name", ["first layer of many strips", "last layer of six", "groups of many strips"])
def test_zero_rows_and_gains(vectors, name):
    assert_zero_rows_and_gains(CASES[name], TOLERANCE)


@pytest.mark.parametrize(
    "name",
    [
        "first layer of many strips",
        "last layer of wide taps",
        "groups of many strips",
        "groups of a signal, many taps",
        "transposed last layer of many strips",
    ],
)
def test_same_bits_with_any_number_of_threads(vectors, name):
    case = CASES[name]
    if not all(go_by("strips", case)):
        pytest.skip("no kernels of strips")
    assert products_of(case) >= 2**18  # below which one worker does it all
    assert_same_bits_by_threads(case)


@pytest.mark.parametrize("name", ["first layer", "last layer by 2"])
def test_maps_that_are_cut_out_of_larger_ones(vectors, name):
    case = CASES[name]
    tensors = sample(case)
    for dims in ((0, 1), (2, 3)):
        wide = torch.randn([2 * n if d in dims else n for d, n in enumerate(tensors[0].shape)])
        every_other = tuple(slice(None, None, 2) if d in dims else slice(None) for d in range(4))
        for x in (wide[every_other], channels_last(wide, True)[every_other]):
            assert_close(*both(case, [x, *tensors[1:]]), TOLERANCE)

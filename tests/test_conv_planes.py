"""1x1 convolutions of maps in NCHW: products of v and each image as it lies."""

from __future__ import annotations

import itertools

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
)

from wnfused.backends import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

TOLERANCE = 32 * 2.0**-24


def layer(images: int, inputs: int, outputs: int, *size: int) -> Case:
    ones = (1,) * len(size)
    return Case(images, inputs, outputs, size, ones, ones, (0,) * len(size), ones)


CASES = {
    "blocks of one image": layer(1, 40, 50, 4, 8),
    "blocks of two images": layer(3, 40, 50, 7, 7),
    "fewest pixels": layer(7, 33, 40, 3, 5),
    "one image, a part of a block": layer(1, 64, 32, 5, 5),
    "more inputs than are packed at a time": layer(2, 530, 40, 5, 5),
    "more outputs than are packed at a time": layer(2, 40, 530, 5, 5),
    "many blocks": layer(2, 32, 48, 17, 31),
    "images of a whole chunk of dw's depth": layer(3, 32, 32, 16, 16),
    "images just below it": layer(3, 32, 32, 2, 121),
    "images in pieces": layer(2, 33, 40, 257),
    "one dim": layer(4, 40, 64, 50),
    "three dims": layer(2, 35, 33, 3, 2, 5),
    "a stride": layer(2, 64, 96, 51, 53)._replace(stride=(2, 2)),
    "a stride along the lines": layer(1, 70, 80, 40, 76)._replace(stride=(1, 2)),
    "a stride in one dim": layer(4, 64, 130, 1000)._replace(stride=(3,)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_size(vectors, case):
    assert go_by("planes", case) == ((vectors != "portable",) * 2)
    assert_layouts_agree(case, sample(case), TOLERANCE)


def test_a_stride_on_few_pixels(vectors):
    """By AVX2, for which no other kernel packs so many weights for them."""
    case = layer(1, 256, 192, 7, 9)._replace(stride=(2, 2))
    assert go_by("planes", case) == ((vectors == "avx2",) * 2)
    assert_layouts_agree(case, sample(case), TOLERANCE)


FEW_CHANNELS = {
    "few inputs": layer(2, 3, 64, 5, 7),
    "two inputs": layer(3, 2, 40, 10, 10),
    "as many outputs as a tile has rows": layer(3, 40, 4, 7, 7),
    "a part of a block of outputs": layer(2, 70, 7, 4, 8),
    "few of both": layer(5, 8, 10, 3, 5),
    "few of three dims": layer(2, 12, 9, 3, 2, 5),
}


@pytest.mark.parametrize("case", FEW_CHANNELS.values(), ids=FEW_CHANNELS)
def test_few_channels(vectors, case):
    """Forward by AVX2, whose other kernels would leave most of a block empty."""
    assert go_by("planes", case) == (vectors == "avx2", False)
    assert_layouts_agree(case, sample(case), TOLERANCE)


def test_which_layers_go_this_way():
    if torch.ops.wnfused_native.cpu_isa() == "portable":
        pytest.skip("no products of this library")
    assert go_by("planes", layer(1, 1024, 256, 14, 14)) == (True, True)
    assert go_by("planes", layer(1, 16, 16, 32, 32)) == (True, False)
    assert go_by("planes", layer(1, 64, 3, 32, 32)) == (False, False)
    assert go_by("planes", layer(64, 64, 64, 3, 3)) == (False, False)
    assert go_by("planes", layer(0, 64, 64, 8, 8)) == (False, False)


@pytest.mark.parametrize("layout", ["last", "last map", "last weight"])
def test_channels_last_stays_so(vectors, layout):
    case = CASES["blocks of two images"]
    assert_layouts_agree(case, sample(case, layout), TOLERANCE)


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4)), ids=str)
@pytest.mark.parametrize("name", ["blocks of two images", "a stride in one dim"])
def test_only_what_is_needed(name, needs):
    assert_only_what_is_needed(CASES[name], needs, TOLERANCE)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.sampled_from([(15,), (4, 4), (17,), (3, 7), (7, 7), (10, 10), (16, 15), (241,), (16, 16), (19, 33)]))
    counts = (draw(st.integers(1, 6)), draw(st.integers(3, 90)), draw(st.integers(4, 90)))
    return layer(*counts, *size)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(), activation=st.sampled_from(["none", "relu", "leaky_relu"]))
def test_drawn_layers(vectors, case, activation):
    assert_close(*both(case, sample(case), activation), TOLERANCE)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("which", range(5))
def test_values_that_are_not_finite(which, value):
    assert_not_finite_as_torch(CASES["blocks of two images"], which, value)


def test_masks_of_nan():
    assert_masks_nan_as_torch(CASES["blocks of two images"], TOLERANCE)


def test_zero_rows_and_gains(vectors):
    assert_zero_rows_and_gains(CASES["many blocks"], TOLERANCE)


@pytest.mark.parametrize("name", ["blocks of two images", "more inputs than are packed at a time", "a stride"])
def test_same_bits_with_any_number_of_threads(vectors, name):
    assert_same_bits_by_threads(CASES[name])


@pytest.mark.parametrize("name", ["blocks of two images", "a stride"])
def test_maps_that_are_cut_out_of_larger_ones(vectors, name):
    case = CASES[name]
    tensors = sample(case)
    for dims in ((0, 1), (2, 3)):
        wide = torch.randn([2 * n if d in dims else n for d, n in enumerate(tensors[0].shape)])
        every_other = tuple(slice(None, None, 2) if d in dims else slice(None) for d in range(4))
        for x in (wide[every_other], channels_last(wide, True)[every_other]):
            assert_close(*both(case, [x, *tensors[1:]]), TOLERANCE)

"""Transposed convolutions on the vendor's product, in C++: groups, few channels over three dims, and what the kernels
leave because a value is not finite. Against float64."""

from __future__ import annotations

import itertools
from unittest.mock import Mock, patch

import pytest
import torch
from own_conv import (
    LAYOUTS,
    Case,
    assert_layouts_agree,
    assert_not_finite_as_torch,
    assert_only_what_is_needed,
    assert_zero_rows_and_gains,
    both,
    sample,
)

from wnfused.backends import native, native_composed

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

TOLERANCE = 64 * 2.0**-24


def transposed(images, inputs, outputs, size, kernel, stride, padding, dilation, groups, output_padding=(0, 0, 0)):
    return Case(images, inputs, outputs, size, kernel, stride, padding, dilation, True, output_padding, groups)


CASES = {
    "groups": transposed(2, 24, 12, (5, 6), (4, 4), (2, 2), (1, 1), (1, 1), 4),
    "depthwise": transposed(2, 16, 16, (5, 6), (4, 3), (2, 1), (1, 1), (1, 1), 16),
    "groups of one dim": transposed(3, 32, 48, (20,), (8,), (4,), (2,), (1,), 8, (1,)),
    "groups of three dims": transposed(1, 12, 18, (3, 4, 5), (3, 2, 3), (2, 1, 2), (1, 0, 1), (1, 1, 1), 3, (1, 0, 1)),
    "few channels of three dims": transposed(1, 16, 2, (4, 3, 4), (2, 2, 2), (2, 2, 2), (0, 0, 0), (1, 1, 1), 1),
    "a stride and a dilation": transposed(2, 16, 8, (9,), (4,), (2,), (1,), (2,), 2),
    "strided pixels": transposed(2, 12, 8, (5, 7), (1, 1), (2, 2), (0, 0), (1, 1), 2, (1, 1)),
    "an empty batch": transposed(0, 24, 12, (5, 6), (4, 4), (2, 2), (1, 1), (1, 1), 4),
}
SOME = [CASES[name] for name in ("groups", "groups of one dim", "few channels of three dims")]


@pytest.fixture(autouse=True)
def no_python():
    error = AssertionError("composed in Python")
    with patch.multiple(native_composed, conv=Mock(side_effect=error), conv_backward=Mock(side_effect=error)):
        yield


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(case, layout):
    if len(case.size) == 1 and layout != "nchw":
        pytest.skip("channels_last is of two dims and three")
    assert_layouts_agree(case, sample(case, layout), TOLERANCE)


@pytest.mark.parametrize("case", SOME, ids=str)
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4)), ids=str)
def test_only_what_is_needed(needs, case):
    assert_only_what_is_needed(case, needs, TOLERANCE)


@pytest.mark.parametrize("name", [name for name in CASES if name != "an empty batch"])
@pytest.mark.parametrize("narrow_weights", [False, True])
def test_bfloat16(name, narrow_weights):
    tensors = [t.bfloat16() for t in sample(CASES[name])]
    if not narrow_weights:
        tensors[1:4] = [t.float() for t in tensors[1:4]]
    found, wanted = both(CASES[name], tensors, "relu")
    for key, t in found.items():
        of_parameters = torch.float32 if key == "norm" else tensors[1].dtype
        assert t.dtype == (of_parameters if key in ("norm", "dv", "dg", "db") else torch.bfloat16), key
        error = (t.double() - wanted[key]).norm() / wanted[key].norm()
        assert error < 2**-6, f"{key}: {error:.2e}"


@pytest.mark.parametrize("case", SOME, ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("which", [0, 2, 3, 4], ids=["x", "g", "bias", "residual"])
def test_what_is_not_finite(case, which, value):
    assert_not_finite_as_torch(case, which, value)


def test_what_the_kernels_leave_because_it_is_not_finite():
    case = transposed(2, 32, 16, (5, 6), (4, 4), (2, 2), (1, 1), (1, 1), 1)
    assert_not_finite_as_torch(case, 0, float("inf"))


@pytest.mark.parametrize("case", SOME, ids=str)
def test_zero_rows_and_gains(case):
    assert_zero_rows_and_gains(case, TOLERANCE)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_the_same_bits_again(case):
    tensors = sample(case)
    first, second = (both(case, [t.clone() for t in tensors])[0] for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)

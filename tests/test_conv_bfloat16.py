"""Convolutions in bfloat16 on this library's own CPU kernels, which multiply them as float32 but on tiles.

So nothing is rounded but what is handed out: y, dx and dz differ from float64 by that rounding, gradients of float32
parameters by float32's errors. Products of bfloat16, on tiles or the vendor's, may be off by a hundred times as much.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from instruction_sets import ISAS
from own_conv import (
    LAYOUTS,
    NAMES,
    Case,
    assert_not_finite_as_torch,
    both,
    method_of,
    same3x3,
    sample,
    way_of,
)

from wnfused import reference
from wnfused.backends import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

ROUNDING = 2.0**-8
FLOAT = 256 * 2.0**-24

CASES = [
    ("winograd4", same3x3(2, 16, 32, 8, 9)),
    ("winograd4", same3x3(1, 20, 23, 12, 7)),
    ("winograd4", same3x3(2, 160, 160, 13, 10)),  # packed group by group
    ("winograd4", same3x3(2, 32, 48, 3, 8, 7)),
    ("winograd2", same3x3(3, 32, 16, 6, 5)),
    ("winograd4", same3x3(2, 64, 64, 12, 13)._replace(groups=4)),
    ("winograd4", same3x3(2, 64, 64, 9, 12)._replace(groups=8)),
    ("pieces", Case(2, 16, 24, (19,), (7,), (1,), (3,), (1,))),
    ("pieces", Case(2, 20, 16, (9, 12), (5, 5), (1, 1), (2, 2), (1, 1))),
    ("direct", Case(2, 24, 40, (9, 11), (3, 3), (2, 2), (1, 1), (1, 1))),
    ("direct", Case(2, 24, 40, (9, 8), (1, 1), (1, 1), (0, 0), (1, 1))),
    ("direct", Case(2, 32, 40, (9, 8), (1, 1), (1, 1), (0, 0), (1, 1))),
    ("direct", Case(2, 3, 20, (13, 12), (7, 7), (2, 2), (3, 3), (1, 1))),
    ("direct", Case(2, 1, 16, (33,), (9,), (2,), (4,), (1,))),
    ("direct", Case(2, 48, 48, (9, 21), (3, 3), (1, 1), (1, 1), (1, 1), groups=48)),
    ("direct", Case(2, 20, 20, (12, 9), (3, 3), (2, 2), (1, 1), (1, 1), groups=20)),
    ("direct", Case(1, 32, 32, (9, 9), (3, 3), (2, 2), (1, 1), (1, 1), groups=2)),
]
# Which have no method, or another way on few pixels.
OTHERS = [
    Case(2, 24, 20, (9, 7), (4, 4), (2, 2), (1, 1), (1, 1), transposed=True),
    Case(1, 20, 40, (21,), (16,), (8,), (4,), (1,), transposed=True),
    Case(1, 20, 40, (1, 3), (4, 4), (2, 2), (1, 1), (1, 1), transposed=True),
    Case(2, 160, 150, (2, 2), (3, 3), (1, 1), (1, 1), (1, 1)),
    Case(1, 300, 200, (20,), (3,), (1,), (1,), (1,)),
]


def in_bfloat16(tensors, parameters=torch.float32):
    x, *parts, residual = tensors
    return [x.bfloat16(), *(None if p is None else p.to(parameters) for p in parts),
            None if residual is None else residual.bfloat16()]  # fmt: skip


def multiplies_bfloat16(case, y):
    """On tiles; and with AMX whatever has more products than make up for a call of the vendor's
    (``is_vendors_bfloat16``).
    """
    products = y.numel() * case.inputs // case.groups * math.prod(case.kernel)
    vendors = torch.ops.wnfused_native.cpu_isa() == "amx" and products > 5_000_000 * torch.get_num_threads()
    return vendors or method_of(case, bfloat16=True) == "pairs"


def assert_only_rounded(case, found, wanted, parameters=torch.float32):
    exact = ROUNDING if multiplies_bfloat16(case, found["y"]) else FLOAT
    dtypes = dict.fromkeys(("y", "dx", "dz"), torch.bfloat16)
    dtypes |= {"norm": torch.float32} | dict.fromkeys(("dv", "dg", "db"), parameters)
    for name, dtype in dtypes.items():
        actual, expected = found[name], wanted[name]
        if actual.numel() == 0 == expected.numel():
            continue
        assert (actual.dtype, actual.shape) == (dtype, expected.shape), name
        error = (actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)
        assert error <= (ROUNDING if dtype == torch.bfloat16 else exact), f"{name}: {error:.2e}"


@pytest.mark.parametrize(("method", "case"), CASES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_method_and_layout(isa, method, case, layout):
    assert method_of(case) == method
    for activation in ("none", "relu", "leaky_relu"):
        tensors = in_bfloat16(sample(case, layout))
        found, wanted = both(case, tensors, activation)
        assert_only_rounded(case, found, wanted)
    if len(case.size) == 2:
        assert found["y"].stride() == torch.convolution(*sample(case, layout)[:2], None, *case.geometry).stride()
    assert found["dv"].stride() == tensors[1].stride()


@pytest.mark.parametrize("case", OTHERS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_pixels_and_transposed_layers(isa, case, layout):
    if way_of(case) == "vendor":
        pytest.skip("the vendor's")
    for activation in ("none", "leaky_relu"):
        assert_only_rounded(case, *both(case, in_bfloat16(sample(case, layout)), activation))


@pytest.mark.parametrize("case", [*(case for _, case in CASES), *OTHERS], ids=str)
def test_parameters_in_bfloat16_too(isa, case):
    found, wanted = both(case, in_bfloat16(sample(case), torch.bfloat16))
    assert_only_rounded(case, found, wanted, torch.bfloat16)


@pytest.mark.parametrize("dim", [1, None])
def test_norms_along_another_dim(isa, dim):
    case = same3x3(2, 16, 32, 8, 9)
    x, v, _, bias, residual = in_bfloat16(sample(case))
    g = torch.randn([] if dim is None else [v.shape[dim]])
    tail = (*case.geometry, dim, "relu", 0.1)
    y, norm = native.conv(x, v, g, bias, residual, *tail)
    dy = torch.randn(y.shape).bfloat16()
    found = dict(zip(NAMES, (y, norm, *native.conv_backward(dy, y, x, v, g, norm, [True] * 4, *tail)), strict=True))
    wide = [t.double() for t in (x, v, g, bias, residual)]
    exact, exact_norm = reference.conv(*wide, *tail)
    gradients = reference.conv_backward(dy.double(), y.double(), *wide[:3], exact_norm, [True] * 4, *tail)
    assert_only_rounded(case, found, dict(zip(NAMES, (exact, exact_norm, *gradients), strict=True)))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.tuples(st.integers(1, 4), st.integers(8, 40), st.integers(8, 40)),
    size=st.lists(st.integers(5, 17), min_size=1, max_size=2),
    kernel=st.integers(2, 6),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    layout=st.sampled_from(sorted(LAYOUTS)),
    strided=st.booleans(),
    activation=st.sampled_from(["none", "relu", "leaky_relu"]),
    isa_name=st.sampled_from(ISAS),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_drawn_layers(counts, size, kernel, stride, padding, layout, strided, activation, isa_name, seed):
    ones = (1,) * len(size)
    window = ((min(kernel, *size),) * len(size), (stride,) * len(size), (padding,) * len(size), ones)
    case = Case(*counts, tuple(size), *window)
    tensors = in_bfloat16(sample(case, layout, seed))
    if strided:
        tensors[0] = tensors[0].mT.contiguous().mT
        tensors[4] = torch.stack([tensors[4]] * 2, -1).flatten(-2)[..., ::2]
    torch.ops.wnfused_native.set_cpu_isa(isa_name)
    try:  # what is asked of it, too, is that instruction set's
        if method_of(case) != "vendor":
            assert_only_rounded(case, *both(case, tensors, activation))
    finally:
        torch.ops.wnfused_native.set_cpu_isa("auto")


@pytest.mark.parametrize("which", [0, 3, 4], ids=["x", "bias", "residual"])
@pytest.mark.parametrize(("method", "case"), CASES[:1] + CASES[5:8] + CASES[12:13], ids=str)
def test_what_is_not_finite_is_the_vendors(isa, method, case, which):
    for value in (float("inf"), float("nan")):
        assert_not_finite_as_torch(case, which, value, in_bfloat16)


def test_gradients_of_patches_are_exact(isa):
    """Of more taps than the kernels have; the vendor's backward takes longer than float32's products."""
    case = Case(2, 3, 768, (112, 112), (16, 16), (16, 16), (0, 0), (1, 1))
    if way_of(case) == "vendor":
        pytest.skip("the vendor's")
    found, wanted = both(case, in_bfloat16(sample(case)))
    assert_only_rounded_gradients(found, wanted)


def assert_only_rounded_gradients(found, wanted):
    for name, limit in (("y", 2 * ROUNDING), ("dx", ROUNDING), ("dv", FLOAT), ("dg", FLOAT)):
        error = (found[name].double() - wanted[name]).norm() / wanted[name].norm()
        assert error <= limit, f"{name}: {error:.2e}"


def test_dot_products_take_what_winograd_does_not_save_more_of(isa):
    """Dot products of bfloat16 are twice as many as float32's; wide windows of many products are the vendor's."""
    if isa != "avx512_bf16":
        pytest.skip("no such instructions, or tiles")
    ones, twos = (1, 1), (2, 2)
    threads = torch.get_num_threads()
    strided = Case(8 * threads, 64, 64, (32, 32), (3, 3), twos, ones, ones)
    same, wide = same3x3(8 * threads, 64, 64, 32, 32), Case(8 * threads, 64, 64, (32, 32), (5, 5), ones, twos, ones)
    assert method_of(strided, bfloat16=True) == "pairs"
    assert [method_of(case, bfloat16=True) for case in (same, wide)] == ["winograd4", "vendor"]
    for case, exact in ((same, True), (wide, False)):
        found, wanted = both(case, in_bfloat16(sample(case)))
        error = (found["y"].double() - wanted["y"]).norm() / wanted["y"].norm()
        once = 1.9e-3  # rounding y alone makes 1.65e-3, w as well 2.3e-3
        assert (error <= once) == exact, f"{case}: {error:.2e}"

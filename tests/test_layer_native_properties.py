"""Single layers over drawn shapes, layouts and dtypes: every instruction set against the reference in float64.

Linear layers and convolutions of one to three spatial dims, plain and transposed. Rounding errors of a sum of K
products walk at random, so sizes are compared in the Euclidean norm with a few eps times the walk's length; masks are
read off the output that the kernels gave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from instruction_sets import ISAS
from torch import Tensor

from wnfused import reference
from wnfused.backends import native

pytestmark = [
    pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable())),
    pytest.mark.usefixtures("one_thread"),
]
SETTINGS = {
    "deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.function_scoped_fixture],
}  # fmt: skip

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass
class Case:
    op: str
    tensors: list[Tensor | None]  # x, v, g, bias, residual
    constants: tuple[Any, ...]
    dy: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype


@st.composite
def values(draw, shape, size=1.0, dtype=torch.float32):
    """Numbers of about ``size`` in one of the memory orders that users have."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    t = torch.randn(shape, generator=generator, dtype=torch.float64).mul(size).to(dtype)
    order = draw(st.sampled_from(["contiguous", "contiguous", "last", "strided", "flipped"]))
    if order == "last" and len(shape) in FORMATS:
        return t.contiguous(memory_format=FORMATS[len(shape)])
    if order == "strided" and len(shape):
        return torch.stack([t, t], -1).flatten(-2)[..., ::2]
    if order == "flipped" and len(shape) > 1:
        return t.mT.contiguous().mT
    return t


@st.composite
def cases(draw):
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    parameters = draw(st.sampled_from([dtype, torch.float32])) if dtype in (torch.bfloat16, torch.float16) else dtype
    narrow = torch.float16 in (dtype, parameters)
    x_size, v_size, gain = draw(
        st.sampled_from([(1, 1, 1)] if narrow else [(1, 1, 1), (1, 1, 1), (1e-3, 1e10, 1e4), (1e4, 1e-12, 1e-6)])
    )
    activation = draw(st.sampled_from([("none", 0.0), ("relu", 0.0), ("leaky_relu", 0.3)]))
    spatial = draw(st.sampled_from([0, 0, 1, 2, 2, 3]))
    batch = draw(st.sampled_from([0, 1, 2, 3, 5]))
    if spatial == 0:
        op, transposed = "linear", False
        rows = (draw(st.sampled_from([0, 1, 2, 3, 4, 7, 16, 17, 33, 70])),)
        x_shape = (*(() if draw(st.booleans()) else (2,)), *rows, draw(st.sampled_from([1, 3, 16, 37, 65, 130])))
        v_shape = (draw(st.sampled_from([1, 2, 9, 16, 33])), x_shape[-1])
        geometry: tuple[Any, ...] = ()
        features = v_shape[0]
    else:
        op, transposed = "conv", draw(st.integers(0, 2)) == 0
        groups = draw(st.sampled_from([1, 1, 2, 3]))
        c_in, c_out = (groups * draw(st.sampled_from([1, 2, 5, 8])) for _ in range(2))
        kernel, stride, dilation = ([draw(st.integers(1, n)) for _ in range(spatial)] for n in (3, 2, 2))
        padding = [draw(st.integers(0, 1 if transposed and k == 1 else k - 1)) * (k > 1) for k in kernel]
        sizes = [
            d * (k - 1) + draw(st.integers(1, 6 if spatial < 3 else 3)) for k, d in zip(kernel, dilation, strict=True)
        ]
        extra = [
            draw(st.integers(0, max(s, d) - 1)) if transposed else 0 for s, d in zip(stride, dilation, strict=True)
        ]
        x_shape = (batch, c_in, *sizes)
        v_shape = (c_in, c_out // groups, *kernel) if transposed else (c_out, c_in // groups, *kernel)
        geometry = (stride, padding, dilation, transposed, extra, groups)
        features = c_out
    dim = draw(st.sampled_from([0, 0, 0, 1, None]))
    v = draw(values(v_shape, v_size, parameters))
    if dim is not None and v.shape[dim] > 1 and draw(st.booleans()):
        v.select(dim, 0).zero_()
    rows = 1 if dim is None else v_shape[dim]
    g = draw(
        values(
            (rows,) if draw(st.booleans()) or dim is None else (*(1,) * dim, rows, *(1,) * (len(v_shape) - dim - 1)),
            gain,
            parameters,
        )
    )
    if draw(st.booleans()):
        g.view(-1)[0] = 0
    x = draw(values(x_shape, x_size, dtype))
    shape = (
        (*x_shape[:-1], features) if op == "linear" else torch.convolution(x.float(), v.float(), None, *geometry).shape
    )
    y_size = gain * x_size
    bias = draw(values((features,), y_size, parameters)) if draw(st.booleans()) else None
    residual = draw(values(shape, y_size, dtype)) if draw(st.booleans()) else None
    dy = draw(values(shape, 1, dtype))
    return Case(op, [x, v, g, bias, residual], (*geometry, dim, *activation), dy)


def size(*tensors):
    return max(float(t.detach().double().norm()) for t in tensors if t is not None)


def unit(dtype):
    """A few roundings of an operand and of the result, or of the sums' terms where both are exact."""
    return {torch.float64: 64 * 2.0**-53, torch.float32: 64 * 2.0**-24, torch.float16: 8 * 2.0**-11}.get(
        dtype, 4 * 2.0**-9
    )


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=100, **SETTINGS)
@given(cases())
def test_layers_against_float64(isa, case):
    torch.ops.wnfused_native.set_cpu_isa(isa)
    try:
        y, norm = getattr(native, case.op)(*case.tensors, *case.constants)
        x, v, g, *_ = case.tensors
        needs = [True] * 4
        gradients = getattr(native, f"{case.op}_backward")(case.dy, y, x, v, g, norm, needs, *case.constants)
    finally:
        torch.ops.wnfused_native.set_cpu_isa("auto")
    wide = [None if t is None else t.double() for t in case.tensors]
    dy, (wx, wv, wg, _, residual) = case.dy.double(), wide
    wanted, wanted_norm = getattr(reference, case.op)(*wide, *case.constants)
    wanted_gradients = getattr(reference, f"{case.op}_backward")(
        dy, y.double(), wx, wv, wg, wanted_norm, needs, *case.constants
    )
    tolerance = unit(case.dtype)
    assert (y.dtype, y.shape) == (case.dtype, wanted.shape)
    assert (norm.double() - wanted_norm).norm() <= 64 * 2.0**-24 * wanted_norm.norm()
    if wanted.numel() == 0:
        assert not any(t.any() for t in gradients[:4])
        return
    for name, found, expected, tensor in zip(
        ("dx", "dv", "dg", "db", "dz"), gradients, wanted_gradients, (x, v, g, v, y), strict=True
    ):
        assert found.shape == expected.shape, name
        assert found.dtype == tensor.dtype, name
    # The terms of y: products that may cancel, and what is added to them.
    terms = size(wanted, wx) if wx.numel() == 0 else size(wanted, residual, product_size(case, wide))
    assert size(y - wanted) <= tolerance * terms
    dx, dv, dg, db, dz = gradients
    wanted_dx, wanted_dv, wanted_dg, wanted_db, wanted_dz = wanted_gradients
    # A gradient is a linear map of dz: its norm, or what independent terms of that size would add up to.
    gain = float(wg.abs().max())
    assert size(dz - wanted_dz) <= tolerance * size(dy)
    assert size(db - wanted_db) <= tolerance * size(wanted_db, dy)
    assert size(dx - wanted_dx) <= tolerance * max(size(wanted_dx), gain * size(dy))
    walk = size(dy) * size(wx) / max(wx.numel() / max(wx.shape[1 if case.op == "conv" else -1], 1), 1) ** 0.5
    assert size(dg - wanted_dg) <= 2 * tolerance * max(size(wanted_dg), walk)
    alive = wanted_norm[wanted_norm > 0]
    if alive.numel() and case.dtype != torch.float16:
        assert size(dv - wanted_dv) <= 2 * tolerance * max(size(wanted_dv), walk * gain / float(alive.min()))


def product_size(case, wide):
    """The size of the product alone."""
    x, v, g, *_ = wide
    return getattr(reference, case.op)(x, v, g, None, None, *case.constants[:-2], "none", 0.0)[0]


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=40, **SETTINGS)
@given(cases(), st.sampled_from([float("inf"), -float("inf"), float("nan")]), st.integers(0, 2**16))
def test_what_is_not_finite_comes_out_as_torch_gives_it(isa, case, value, place):
    """One entry of x; where torch's own layer with the same weight is finite, inf or NaN, so are we."""
    x, v, g, bias, residual = case.tensors
    if x.numel() == 0:
        return
    x = x.contiguous().clone()
    x.view(-1)[place % x.numel()] = value
    torch.ops.wnfused_native.set_cpu_isa(isa)
    try:
        y, _ = getattr(native, case.op)(x, v, g, bias, residual, *case.constants)
    finally:
        torch.ops.wnfused_native.set_cpu_isa("auto")
    wide = [None if t is None else t.double() for t in (x, v, g, bias, residual)]
    wanted, _ = getattr(reference, case.op)(*wide, *case.constants)
    assert torch.equal(y.isnan(), wanted.isnan())
    assert torch.equal(y.isinf(), wanted.isinf())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_denormal_inputs_keep_what_they_have(isa, rows):
    """Products of denormals with weights near 1 are exact to the last bit that float32 has there."""
    x, v = torch.randn(rows, 40) * 1e-39, torch.randn(20, 40)
    g = torch.rand(20) + 0.5
    torch.ops.wnfused_native.set_cpu_isa(isa)
    y, _ = native.linear(x, v, g, None, None, 0, "none")
    torch.ops.wnfused_native.set_cpu_isa("auto")
    wanted, _ = reference.linear(x.double(), v.double(), g.double())
    smallest = 2.0**-149  # a rounding to the grid of denormals for each of 40 products, scaled by at most 1.5
    assert (y.double() - wanted).abs().max() <= 1.5 * 40 * smallest

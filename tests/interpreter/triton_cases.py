"""What the tests of the Triton kernels share: the device, small tiles, and the comparison with float64.

Tolerances. Sums of K products round by about ``sqrt(K) 2^-24``, and K is below 2,000 here: 1e-5. Half precision, with
unit roundoff ``u``: operands are given rounded; the effective weight is rounded once and so is the result; where the
vendor's product returns dw rounded, the weight norm's backward takes a component of it away and leaves the rounding,
hence ``8 u``. Masks never flip: the reference reads them off the same output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wnfused import reference
from wnfused.backends import triton as backend
from wnfused.backends.triton import support
from wnfused.backends.triton.configurations import Tile

DEVICE = "cpu" if support.interpreted() else "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8 * 2.0**-9, torch.float16: 8 * 2.0**-11}
NAMES = ("y", "norm", "dx", "dv", "dg", "db", "dz")

SMALL = Tile(16, 16, 16, 4, 2)
"""A tile so small that the tests' little problems are many tiles, with ragged ones at every edge."""


def relative(found: Tensor, expected: Tensor) -> float:
    """The error norm-wise; of values below 1 it is absolute."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp_min(1))


def both(
    op: str, tensors: list[Tensor | None], geometry: tuple = (), activation: str = "none", slope: float = 0.1,
    dim: int | None = 0, dy: Tensor | None = None, needs: tuple[bool, ...] = (True,) * 4,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:  # fmt: skip
    """One layer, forward and backward, on the backend and by the reference in float64."""
    tail = (*geometry, dim, activation, slope)
    y, norm = getattr(backend, op)(*tensors, *tail)
    dy = torch.randn(y.shape, device=DEVICE).to(y.dtype) if dy is None else dy
    x, v, g, *_ = tensors
    found = (y, norm, *getattr(backend, f"{op}_backward")(dy, y, x, v, g, norm, list(needs), *tail))
    wide = [None if t is None else t.double() for t in tensors]
    exact, norm64 = getattr(reference, op)(*wide, *tail)
    gradients = getattr(reference, f"{op}_backward")(dy.double(), y.double(), *wide[:3], norm64, list(needs), *tail)
    return dict(zip(NAMES, found, strict=True)), dict(zip(NAMES, (exact, norm64, *gradients), strict=True))


def bias(found: Tensor, expected: Tensor) -> float:
    """The mean relative error: what would add up from layer to layer. Rounding to nearest leaves next to none."""
    return float(((found.detach().double() - expected) / expected).mean())


def check(found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    errors = {}
    for name, wanted in expected.items():
        assert found[name].shape == wanted.shape, name
        assert torch.isfinite(found[name]).all(), name
        errors[name] = relative(found[name], wanted)
    assert max(errors.values()) < TOLERANCE[dtype], errors

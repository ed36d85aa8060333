"""Penalties for matrices ``W [..., r, c]`` that are not orthogonal; each gives ``[...]``, one number a matrix.

All are functions of ``E = W W^T / s^2 - I``, with the Gram matrix of the smaller side (of W^T for r > c), so that 0 can
be reached. With ``D = dP/dE`` the gradient is

    dP/dW = (D + D^T) W / s^2,

which is computed from W again in the backward: nothing but W is kept, and it can be differentiated again. Inside the
transforms of ``torch.func`` and in forward mode, which look into the function, autograd differentiates P instead. Norms
and sums of half-precision matrices are taken in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from wnfused._numbers import above_0, draws_on, positive, random_source
from wnfused.reference import wide
from wnfused.regularize.matrices import (
    at_its_own_precision,
    can_be_seen,
    check_finite,
    check_like,
    check_matrices,
)


def soft(w: Tensor) -> Tensor:
    """``||W W^T - I||_F^2``, ``[...]``; gradient ``4 (W W^T - I) W``.

    For more rows than columns ``||W^T W - I||_F^2``, which is less by the constant ``r - c``.

    Args:
        w: ``[..., r, c]``, floating point. NaN and inf give NaN or inf, here and in the other penalties.

    Raises:
        TypeError: ``w`` is no dense floating-point tensor.
        ValueError: ``w`` is no batch of matrices.

    Source: Hlav 2019, eq. 8; Bansal et al. 2018, section 3.1.
    """
    check_matrices(w)
    return _penalty(w, 1.0, _Soft)


def gain_adjusted(w: Tensor, gain: float | Tensor) -> Tensor:
    """``||W W^T / gain^2 - I||_F^2``, ``[...]``; gradient ``(4 / gain^2) (W W^T / gain^2 - I) W``.

    Pulls the singular values to ``gain`` instead of 1, so that what a critical initialisation set stays. For more rows
    than columns, that of ``W^T W``, which is less by the constant ``r - c``.

    Args:
        w: ``[..., r, c]``, floating point.
        gain: above 0, and neither so small nor so large that ``1 / gain^2`` is no number of w's dtype, or of float32
            where that is the wider; a number, or a constant real tensor ``[...]`` with one for each matrix, on w's
            device. A tensor of a single number may be on the CPU.

    Raises:
        TypeError: ``w`` is no dense floating-point tensor, or ``gain`` no number and no real tensor.
        ValueError: ``w`` is no batch of matrices; a ``gain`` of another shape or on another device, or one that is not
            finite and above 0, or without ``1 / gain^2``.

    Source: Hlav 2019, eq. 10.
    """
    check_matrices(w)
    if not isinstance(gain, Tensor):
        above_0(gain=gain)
        check_square(gain, wide(w.dtype))
        return adjusted(w, gain)
    if gain.is_complex():
        raise TypeError(f"gain: expected real numbers, got {gain.dtype}")
    if gain.dim() and gain.shape != w.shape[:-2]:
        raise ValueError(f"gain: shape {list(gain.shape)} does not fit; use {list(w.shape[:-2])}")
    if gain.device != w.device and (gain.dim() or gain.is_meta):  # a single number may come from a CPU
        raise ValueError(f"gain: is on {gain.device}, w on {w.device}; use one device")
    if can_be_seen(gain) and not has_inverse_square(gain.to(wide(w.dtype))).all():
        raise ValueError(f"gain: {gain} must be finite and above 0, and 1 / gain^2 a number in {wide(w.dtype)}")
    return adjusted(w, gain)


def has_inverse_square(gain: Tensor) -> Tensor:
    """Whether a gain is finite and above 0, and so is ``1 / gain^2``."""
    inverse = gain.square().reciprocal()
    return (gain > 0) & (inverse > 0) & inverse.isfinite()


def check_square(gain: float, dtype: torch.dtype) -> None:
    """The same of a number above 0, for matrices in ``dtype``."""
    least = torch.finfo(dtype).tiny ** 0.5
    if not least <= gain <= 1 / least:
        raise ValueError(f"gain: {gain} must be between {least:.1e} and {1 / least:.1e}, for 1 / gain^2 in {dtype}")


def adjusted(w: Tensor, gain: float | Tensor) -> Tensor:
    """``gain_adjusted`` of arguments that are known to be right."""
    if isinstance(gain, Tensor):
        gain = gain.detach().to(w.device, wide(w.dtype))
        return _penalty(w, gain.square().reciprocal()[..., None, None], _Soft)
    return _penalty(w, 1 / gain**2, _Soft)


def double_soft(w: Tensor) -> Tensor:
    """``||W^T W - I||_F^2 + ||W W^T - I||_F^2``, ``[...]``: twice ``soft`` and the constant ``|r - c|``.

    Args:
        w: ``[..., r, c]``, floating point.

    Raises:
        TypeError, ValueError: as ``soft``.

    Source: Bansal et al. 2018, section 3.2.
    """
    return 2 * soft(w) + abs(w.shape[-2] - w.shape[-1])


def mutual_coherence(w: Tensor) -> Tensor:
    """The largest absolute entry of ``W W^T - I``, ``[...]``. Where several are largest, the gradient is the first's.

    For more rows than columns that of ``W^T W - I``.

    Args:
        w: ``[..., r, c]``, floating point.

    Raises:
        TypeError, ValueError: as ``soft``.

    Source: Bansal et al. 2018, section 3.3.
    """
    check_matrices(w)
    return _penalty(w, 1.0, _MutualCoherence)


def srip(w: Tensor, *, steps: int = 2, start: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
    """The spectral norm of ``E = W W^T - I`` by power iteration, ``||E^steps x|| / ||E^(steps - 1) x||``, ``[...]``.

    For more rows than columns ``E = W^T W - I``.

    Spectral restricted isometry property. The gradient is that of this very quotient, for a fixed x.

    Args:
        w: ``[..., r, c]``, floating point.
        steps: at least 1; 2 as published.
        start: x, ``[..., min(r, c)]``, floating point, on w's device; Gaussian if None.
        generator: source of the start, on w's device; torch's own if None.

    Raises:
        TypeError: ``w`` or ``start`` is no dense floating-point tensor, or ``generator`` no generator.
        ValueError: ``w`` is no batch of matrices; ``steps`` below 1; a ``start`` of another shape or on another device,
            with NaN or inf, or of zeros, which no power of E moves.

    Source: Bansal et al. 2018, section 3.4, eq. 10.
    """
    positive(steps=steps)
    random_source(generator=generator)
    check_matrices(w)
    wanted = (*w.shape[:-2], min(w.shape[-2:]))
    if start is None:
        draws_on(w.device, generator=generator)
        start = torch.randn(wanted, dtype=wide(w.dtype), device=w.device, generator=generator)
    else:
        check_like("start", start, w, wanted)
        check_finite(start=start)
        if can_be_seen(start) and (start == 0).all(-1).any():
            raise ValueError("start: is 0 for some matrix, which no power of E moves; use random numbers")
    return _penalty(w, 1.0, _SpectralNorm(start.detach().to(wide(w.dtype)), steps))


# ---------------------------------------------------------------------------------------------- functions of E


class _Soft:
    """``||E||_F^2``."""

    @staticmethod
    def value(e: Tensor) -> Tensor:
        return e.square().sum((-2, -1))

    @staticmethod
    def derivative(e: Tensor) -> Tensor:
        return 2 * e


class _MutualCoherence:
    """``max |E_ij|``."""

    @staticmethod
    def value(e: Tensor) -> Tensor:
        flat = e.flatten(-2)
        return flat.gather(-1, _largest(flat)).abs().squeeze(-1)

    @staticmethod
    def derivative(e: Tensor) -> Tensor:
        flat = e.flatten(-2)
        where = _largest(flat)
        sign = flat.detach().gather(-1, where).sign()
        return torch.zeros_like(flat).scatter(-1, where, sign).view_as(e)


def _largest(entries: Tensor) -> Tensor:
    return entries.detach().abs().argmax(-1, keepdim=True)


class _SpectralNorm:
    """``||E^k x|| / ||E^(k-1) x||``, 0 where the denominator is."""

    def __init__(self, start: Tensor, steps: int) -> None:
        self.start, self.steps = start, steps

    def _powers(self, e: Tensor) -> list[Tensor]:
        """``x, E x, ... E^k x`` as columns, the first one and then each but the last scaled to length 1."""
        xs = [_unit(self.start.unsqueeze(-1))]
        for step in range(self.steps):
            x = e @ xs[-1]
            xs.append(x if step == self.steps - 1 else _unit(x))
        return xs

    def value(self, e: Tensor) -> Tensor:
        return _length(self._powers(e)[-1]).flatten(-2).squeeze(-1)

    def derivative(self, e: Tensor) -> Tensor:
        # Back through y_k = E x_(k-1), x_k = y_k / ||y_k||, from the length of the last y.
        xs = self._powers(e)
        dy = _unit(xs[-1])
        total = dy @ xs[-2].mT
        for before, x in zip(reversed(xs[:-2]), reversed(xs[1:-1]), strict=True):
            dx = e.mT @ dy
            length = _length(e @ before)
            dy = torch.where(length > 0, (dx - x * (x * dx).sum(-2, keepdim=True)) / _nonzero(length), 0.0)
            total = total + dy @ before.mT
        return total


def _length(x: Tensor) -> Tensor:
    """Of columns ``[..., n, 1]``, ``[..., 1, 1]``; its derivative at 0 is 0."""
    squares = x.square().sum(-2, keepdim=True)
    return torch.where(squares == 0, 0.0, _nonzero(squares).sqrt())


def _unit(x: Tensor) -> Tensor:
    length = _length(x)
    return torch.where(length == 0, 0.0, x / _nonzero(length))


def _nonzero(t: Tensor) -> Tensor:
    return torch.where(t == 0, torch.ones_like(t), t)


# ------------------------------------------------------------------------------------------------------ machinery


def _penalty(w: Tensor, inverse: Any, kind: Any) -> Tensor:
    """``P(W W^T inverse - I)``, ``inverse`` a number or ``[..., 1, 1]``."""
    matrix = w.to(wide(w.dtype))
    matrix = matrix.mT if w.shape[-2] > w.shape[-1] else matrix
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return _value(matrix, inverse, kind)
    result: Tensor = _OfGram.apply(matrix, inverse, kind)
    return result


class _OfGram(torch.autograd.Function):
    """``P(W W^T / s^2 - I)`` with its explicit gradient."""

    @staticmethod
    def forward(w: Tensor, inverse: Any, kind: Any) -> Tensor:
        return _value(w, inverse, kind)

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.inverse, ctx.kind = inputs[1:]

    @staticmethod
    def backward(ctx: Any, dvalue: Tensor) -> tuple[Tensor, None, None]:
        (w,) = ctx.saved_tensors
        return dvalue[..., None, None] * _gradient(w, ctx.inverse, ctx.kind), None, None


@at_its_own_precision
def _value(w: Tensor, inverse: Any, kind: Any) -> Tensor:
    value: Tensor = kind.value(_defect(w, inverse))
    return value


@at_its_own_precision
def _gradient(w: Tensor, inverse: Any, kind: Any) -> Tensor:
    d = kind.derivative(_defect(w, inverse))
    return inverse * (d + d.mT) @ w


def _defect(w: Tensor, inverse: Any) -> Tensor:
    gram = (w @ w.mT) * inverse
    return gram - torch.eye(w.shape[-2], dtype=w.dtype, device=w.device)

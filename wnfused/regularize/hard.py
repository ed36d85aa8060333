"""Matrices ``W [..., r, c]`` kept orthogonal: columns orthonormal where r >= c, rows otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import orthogonal

from wnfused._modules import check_module
from wnfused._numbers import above_0, at_least_0, finite
from wnfused.linalg.orthogonal import householder
from wnfused.nn import WeightNormalised
from wnfused.reference import wide
from wnfused.regularize.matrices import at_its_own_precision, check_finite, check_like, check_matrices

_MAPS = ("matrix_exp", "cayley", "householder")


@at_its_own_precision
def qr_retraction(w: Tensor, *, gain: float = 1.0) -> Tensor:
    """``gain * Q`` of ``W = Q R`` with R's diagonal positive; of ``W^T`` for more columns than rows.

    Args:
        w: ``[..., r, c]``, floating point, of full rank.
        gain: of the result, finite.

    Returns:
        ``[..., r, c]``, in the dtype of w.

    Raises:
        TypeError: ``w`` is no dense floating-point tensor, or ``gain`` no number.
        ValueError: ``w`` is no batch of matrices or has NaN or inf, or ``gain`` is not finite.

    Source: Absil, Mahony & Sepulchre 2008, example 4.1.3; Hlav 2019.
    """
    check_matrices(w)
    finite(gain=gain)
    check_finite(w=w)
    return qr_factor(w, gain)


def qr_factor(w: Tensor, gain: float) -> Tensor:
    """``qr_retraction`` of arguments that are known to be right."""
    a = w.to(wide(w.dtype))
    q = householder(a) if w.shape[-2] < w.shape[-1] else householder(a.mT).mT
    return (gain * q).to(w.dtype)


@at_its_own_precision
def polar_retraction(w: Tensor, *, gain: float = 1.0) -> Tensor:
    """``gain * U V^T`` of the SVD ``W = U S V^T``: the orthogonal matrix nearest to W.

    It can be differentiated where W has full rank, at an orthogonal W, too; elsewhere the nearest matrix is not the
    only one, and the gradient NaN or inf. Second derivatives, and those of forward mode, go through torch's SVD: NaN
    where singular values are equal.

    Args:
        w: ``[..., r, c]``, floating point.
        gain: of the result, finite.

    Returns:
        ``[..., r, c]``, in the dtype of w.

    Raises:
        TypeError, ValueError: as ``qr_retraction``.

    Source: Absil, Mahony & Sepulchre 2008, example 4.1.3; Hlav 2019.
    """
    check_matrices(w)
    finite(gain=gain)
    check_finite(w=w)
    return polar_factor(w, gain)


def polar_factor(w: Tensor, gain: float) -> Tensor:
    """``polar_retraction`` of arguments that are known to be right."""
    return _clamped(w, gain, gain)


@at_its_own_precision
def singular_value_margin(w: Tensor, margin: float, *, gain: float = 1.0) -> Tensor:
    """W with its singular values kept between ``gain (1 - margin)`` and ``gain (1 + margin)``.

    It can be differentiated as ``polar_retraction``; a singular value at either end counts as kept there.

    Args:
        w: ``[..., r, c]``, floating point.
        margin: at least 0; the lower end is 0 from 1 on.
        gain: above 0.

    Returns:
        ``[..., r, c]``, in the dtype of w.

    Raises:
        TypeError: ``w`` is no dense floating-point tensor, or ``margin`` or ``gain`` no number.
        ValueError: ``w`` is no batch of matrices or has NaN or inf; a ``margin`` below 0, or a ``gain`` that is not
            above 0, or either not finite.

    Source: Vorontsov, Trabelsi, Kadoury & Pal 2017, "On orthogonality and learning recurrent networks with long term
    dependencies"; Hlav 2019, where letting go of the margin works best.
    """
    check_matrices(w)
    above_0(gain=gain)
    at_least_0(margin=margin)
    check_finite(w=w)
    # From a margin of 1 on there is no lower end: a singular value of 0 is none that was kept there.
    return _clamped(w, gain * (1 - margin) if margin < 1 else -math.inf, gain * (1 + margin))


def _clamped(w: Tensor, low: float, high: float) -> Tensor:
    """W with its singular values between two numbers."""
    matrix = w.to(wide(w.dtype))
    # torch.compile takes no function with a rule for forward mode, and of nested forward modes torch drops the outer.
    clamp = _of_singular_values if forward_ad._current_level >= 0 else _Clamped.apply
    result: Tensor = clamp(matrix.mT, low, high).mT if w.shape[-2] < w.shape[-1] else clamp(matrix, low, high)
    return result.to(w.dtype)


def _of_singular_values(w: Tensor, low: float, high: float) -> Tensor:
    u, s, vt = torch.linalg.svd(w, full_matrices=False)
    return u * s.clamp(low, high).unsqueeze(-2) @ vt


class _Clamped(torch.autograd.Function):
    """``U f(S) V^T`` of ``W = U S V^T`` with no more columns than rows and f a clamp.

    Autograd would differentiate U and V, which at equal singular values have no derivatives. The result has one: with
    ``M = U^T dW V``, and quotients that at ``s_i = s_j`` are f's slope,

        d = U [(f_i - f_j) / (s_i - s_j) (M + M^T) / 2 + (f_i + f_j) / (s_i + s_j) (M - M^T) / 2] V^T
            + (I - U U^T) dW V f/S V^T,

    a map that is its own transpose, and so gives the gradient as well.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(w: Tensor, low: float, high: float) -> Tensor:
        return _of_singular_values(w, low, high)

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.ends = inputs[1:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _slope_of_clamped(ctx.saved_tensors[0], gradient, *ctx.ends), None, None


@at_its_own_precision
def _slope_of_clamped(w: Tensor, direction: Tensor, low: float, high: float) -> Tensor:
    u, s, vt = torch.linalg.svd(w, full_matrices=False)
    f = s.clamp(low, high)
    sum_s, sum_f = (t.unsqueeze(-1) + t.unsqueeze(-2) for t in (s, f))
    difference_s, difference_f = (t.unsqueeze(-1) - t.unsqueeze(-2) for t in (s, f))
    equal = difference_s == 0
    slope = ((s > low) & (s < high)).to(s.dtype).unsqueeze(-1)
    symmetric = torch.where(equal, slope, difference_f / torch.where(equal, 1.0, difference_s))
    m = u.mT @ direction @ vt.mT
    inner = (symmetric * (m + m.mT) + _quotient(sum_f, sum_s) * (m - m.mT)) / 2
    # What U does not span; nothing where it is square.
    outer = direction @ vt.mT - u @ m
    return (u @ inner + outer * _quotient(f, s).unsqueeze(-2)) @ vt


def _quotient(f: Tensor, s: Tensor) -> Tensor:
    """``f / s``, 1 where they are equal, both 0, too: without a lower end a clamp leaves small values alone."""
    same = f == s
    return torch.where(same, 1.0, f / torch.where(same, 1.0, s))


@at_its_own_precision
def cayley_step(w: Tensor, gradient: Tensor, lr: float) -> Tensor:
    """``(I + lr/2 A)^-1 (I - lr/2 A) W`` with ``A = G W^T - W G^T``: a descent step along which ``W^T W`` stays.

    For more columns than rows it is taken on the transposes, so that ``W W^T`` stays. Much longer matrices are stepped
    by the Sherman-Morrison-Woodbury formula, whose system has twice the shorter side.

    Args:
        w, gradient: ``[..., r, c]``, floating point, on one device; the dtypes may differ.
        lr: finite.

    Returns:
        ``[..., r, c]``, in the dtype of w.

    Raises:
        TypeError: ``w`` or ``gradient`` is no dense floating-point tensor, or ``lr`` no number.
        ValueError: ``w`` is no batch of matrices; a ``gradient`` of another shape or on another device; NaN or inf in
            either; an ``lr`` that is not finite.

    Source: Wen & Yin 2013, "A feasible method for optimization with orthogonality constraints", eq. 7, lemma 4;
    Hlav 2019.
    """
    check_matrices(w)
    finite(lr=lr)
    check_like("gradient", gradient, w, w.shape)
    check_finite(w=w, gradient=gradient)
    return _stepped(w, gradient, lr) if w.shape[-2] >= w.shape[-1] else _stepped(w.mT, gradient.mT, lr).mT


def _stepped(w: Tensor, gradient: Tensor, lr: float) -> Tensor:
    """The step for no more columns than rows."""
    x, g = w.to(wide(w.dtype)), gradient.to(wide(w.dtype))
    if x.shape[-2] > 2 * x.shape[-1]:
        # A = U V^T.
        u, v = torch.cat([g, x], -1), torch.cat([x, -g], -1)
        system = torch.eye(u.shape[-1], dtype=x.dtype, device=x.device) + lr / 2 * (v.mT @ u)
        return (x - lr * u @ torch.linalg.solve(system, v.mT @ x)).to(w.dtype)
    a = g @ x.mT - x @ g.mT
    identity = torch.eye(a.shape[-1], dtype=x.dtype, device=x.device)
    return torch.linalg.solve(identity + lr / 2 * a, x - lr / 2 * (a @ x)).to(w.dtype)


def orthogonal_proxy(layer: nn.Module, name: str | None = None, orthogonal_map: str | None = None) -> nn.Module:
    """``W = f(proxy)`` with f onto orthogonal matrices, by ``torch.nn.utils.parametrizations.orthogonal``.

    Of a weight-normalised linear layer the directions are orthogonal and g is free.

    Args:
        layer: changed in place.
        name: which parameter, a matrix; the weight, or of a weight-normalised layer ``weight_v``, if None. Of an
            ``nn.RNN`` say ``"weight_hh_l0"``.
        orthogonal_map: ``"matrix_exp"``, ``"cayley"`` or ``"householder"``; torch's choice if None.

    Returns:
        ``layer``.

    Raises:
        TypeError: ``layer`` is not a module.
        ValueError: for an unknown ``orthogonal_map``; a name that is none of the layer's own parameters, as that of a
            weight which something else computes; a parameter without a shape or memory yet, or with NaN or inf; or one
            that is no matrix: torch would make every kernel tap orthogonal on its own.

    Source: Lezcano-Casado & Martinez-Rubio 2019, "Cheap orthogonal constraints in neural networks".
    """
    check_module(layer=layer)
    if orthogonal_map is not None and orthogonal_map not in _MAPS:
        raise ValueError(
            f"orthogonal_map: unknown {orthogonal_map!r}; use one of {', '.join(map(repr, _MAPS))}, or None"
        )
    if not isinstance(name, str | None):
        raise TypeError(f"name: expected the name of a parameter, got {type(name).__name__}")
    name = name or ("weight_v" if isinstance(layer, WeightNormalised) else "weight")
    parameter = layer._parameters.get(name)
    if parameter is None:
        raise ValueError(f"name: {type(layer).__name__} has no parameter {name!r}")
    if is_lazy(parameter):
        raise ValueError(f"layer: {name} has no shape yet; run the layer once")
    if parameter.dim() != 2:
        raise ValueError(f"layer: {name} of shape {list(parameter.shape)} is no matrix; use retract_ or Regularizer")
    if parameter.is_meta:
        raise ValueError(f"layer: {name} is a meta tensor; give it memory first, by layer.to_empty(device=...)")
    check_finite(**{f"layer.{name}": parameter})
    result: nn.Module = orthogonal(layer, name, orthogonal_map)
    return result

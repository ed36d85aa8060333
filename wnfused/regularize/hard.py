"""Matrices ``W [..., r, c]`` kept orthogonal: columns orthonormal where r >= c, rows otherwise."""

from __future__ import annotations

import torch
from torch import Tensor, nn
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
    u, _, vt = torch.linalg.svd(w.to(wide(w.dtype)), full_matrices=False)
    return (gain * u @ vt).to(w.dtype)


@at_its_own_precision
def singular_value_margin(w: Tensor, margin: float, *, gain: float = 1.0) -> Tensor:
    """W with its singular values kept between ``gain (1 - margin)`` and ``gain (1 + margin)``.

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
    u, s, vt = torch.linalg.svd(w.to(wide(w.dtype)), full_matrices=False)
    s = s.clamp(gain * max(1 - margin, 0.0), gain * (1 + margin))
    return (u * s.unsqueeze(-2) @ vt).to(w.dtype)


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

"""The largest singular values of matrices known by their products alone: Golub-Kahan-Lanczos bidiagonalisation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]


def largest_singular_values(
    forward: Product, transposed: Product, start: Tensor, count: int, *, tolerance: float = 1e-6, max_steps: int = 200,
    advance: Callable[[], None] = lambda: None,
) -> Tensor:  # fmt: skip
    """The ``count`` largest singular values ``[n, count]`` of n matrices ``A_i [d_out, d_in]``, falling, in float64.

    After k steps ``A = U B V^T`` on two Krylov spaces, with B upper bidiagonal ``[k, k]`` and both bases
    orthogonalised in full; singular values of B grow towards those of A. Equal ones count once, as a Krylov space
    holds one direction of each.

    Args:
        forward: ``v [n, d_in] -> A v [n, d_out]``.
        transposed: ``u [n, d_out] -> A^T u [n, d_in]``.
        start: ``[n, d_in]``, random. ``d_in`` must not be the larger side: give the products the other way round if
            it is.
        tolerance: relative change of the values over the last three steps at which to stop.
        max_steps: products with A, and as many with its transpose, at most.
    """
    n, size = start.shape
    v = start.double() / start.double().norm(dim=1, keepdim=True)
    right, left, diagonal, above = [v], list[Tensor](), list[Tensor](), list[Tensor]()
    values = start.new_zeros(n, count, dtype=torch.float64)
    history: list[Tensor] = []
    for _ in range(max_steps):
        u = forward(v).double()
        u = _without(u, left)
        scale = torch.stack(diagonal).amax(0) if diagonal else torch.zeros_like(u[:, 0])
        alpha, u = _normalised(u, scale)
        left.append(u)
        diagonal.append(alpha)
        v = _without(transposed(u).double(), right)
        beta, v = _normalised(v, torch.maximum(scale, alpha))
        advance()
        k = len(diagonal)
        bidiagonal = torch.diag_embed(torch.stack(diagonal, 1))
        if above:
            bidiagonal += torch.diag_embed(torch.stack(above, 1), offset=1)
        found = torch.linalg.svdvals(bidiagonal)[:, :count]
        values = torch.nn.functional.pad(found, (0, count - found.shape[1]))
        history.append(values)
        settled = k >= count + 3 and bool(
            ((values - history[-4]).abs() <= tolerance * values[:, :1].clamp(min=torch.finfo(torch.float64).tiny)).all()
        )
        if settled or k >= size:
            break
        above.append(beta)
        right.append(v)
    return values


def _without(x: Tensor, basis: list[Tensor]) -> Tensor:
    """x less its part in the span of an orthonormal basis; twice, as once leaves rounding of the size it removed."""
    for _ in range(2 if basis else 0):
        stacked = torch.stack(basis, 2)
        x = x - (stacked @ (stacked.mT @ x[..., None])).squeeze(-1)
    return x


def _normalised(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Norm and direction; 0 and 0 where nothing but rounding beside ``scale`` is left: the space is exhausted."""
    norm = x.norm(dim=1)
    norm = torch.where(norm > 1e-13 * scale, norm, 0.0)
    return norm, torch.where(norm[:, None] > 0, x / norm[:, None].clamp(min=torch.finfo(x.dtype).tiny), 0.0)

"""The largest singular values of matrices known by their products alone: Golub-Kahan-Lanczos bidiagonalisation."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from wnfused.diagnostics.arguments import gaussian, seeded

Product = Callable[[Tensor], Tensor]

# Products with A, and as many with its transpose, at most.
_MAX_STEPS = 200


def largest_singular_values(
    forward: Product, transposed: Product, start: Tensor, count: int, *, tolerance: float = 1e-6,
    generator: torch.Generator | None = None, advance: Callable[[], None] = lambda: None,
) -> Tensor:  # fmt: skip
    """The ``count`` largest singular values ``[n, count]`` of n matrices ``A_i [d_out, d_in]``, falling, in float64.

    After k steps ``A = U B V^T`` on two Krylov spaces, with B upper bidiagonal ``[k, k]`` and both bases
    orthogonalised in full; singular values of B grow towards those of A. A Krylov space holds one direction of each set
    of equal ones: when it is exhausted, a random direction outside of it begins the next, with a 0 in B. Of copies
    beside many other values the later ones are missed where the values settle before that.

    Args:
        forward: ``v [n, d_in] -> A v [n, d_out]``.
        transposed: ``u [n, d_out] -> A^T u [n, d_in]``.
        start: ``[n, d_in]``, random. ``d_in`` must not be the larger side: give the products the other way round if
            it is.
        tolerance: relative change of the values at which to stop, over three steps, or as many as the longest Krylov
            space took that was exhausted.
        generator: of the directions that begin anew; default: seeded with 0.
    """
    n, size = start.shape
    generator = seeded(generator)
    v = start.double() / start.double().norm(dim=1, keepdim=True)
    right, left, diagonal, above = [v], list[Tensor](), list[Tensor](), list[Tensor]()
    values = start.new_zeros(n, count, dtype=torch.float64)
    history: list[Tensor] = []
    steps, window = torch.zeros_like(v[:, 0]), 3
    # Below this beside the largest element of B, a 0 in its place changes no value by more than it may be wrong.
    negligible = max(1e-13, 1e-2 * tolerance)
    for _ in range(_MAX_STEPS):
        least = negligible * torch.stack(diagonal).amax(0) if diagonal else torch.zeros_like(v[:, 0])
        alpha, u = _outside(left, forward(v).double(), least, generator)
        left.append(u)
        diagonal.append(alpha)
        beta, v = _outside(right, transposed(u).double(), torch.maximum(least, negligible * alpha), generator)
        advance()
        k = len(diagonal)
        bidiagonal = torch.diag_embed(torch.stack(diagonal, 1))
        if above:
            bidiagonal += torch.diag_embed(torch.stack(above, 1), offset=1)
        found = finite_svdvals(bidiagonal)[:, :count]
        values = torch.nn.functional.pad(found, (0, count - found.shape[1]))
        history.append(values)
        exhausted = (alpha == 0) | (beta == 0)
        steps += 1
        window = max(window, int((steps * exhausted).amax()))
        steps = torch.where(exhausted, 0.0, steps)
        if k >= size:
            break
        if k >= max(count + 3, window + 1):
            changes = (values - history[-1 - window]).abs() > tolerance * values[:, :1]
            if not changes.any():  # NaN, once there, stays
                break
        above.append(beta)
        right.append(v)
    return values


def finite_svdvals(matrices: Tensor) -> Tensor:
    """NaN for a matrix that is not finite, where LAPACK would raise."""
    finite = matrices.isfinite().flatten(1).all(1)
    values = torch.linalg.svdvals(torch.where(finite[:, None, None], matrices, 0.0))
    return torch.where(finite[:, None], values, math.nan)


def _outside(basis: list[Tensor], x: Tensor, least: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Norm and direction of what x has outside the span of an orthonormal basis; 0 and a random direction outside of it
    where no more than ``least`` is left."""
    rest = _without(x, basis)
    norm = rest.norm(dim=1)
    norm = torch.where(norm <= least, 0.0, norm)
    exhausted = (norm == 0)[:, None]
    if exhausted.any():
        rest = torch.where(exhausted, _without(gaussian(x.shape, generator, x), basis), rest)
    return norm, torch.nn.functional.normalize(rest, eps=torch.finfo(x.dtype).tiny)


def _without(x: Tensor, basis: list[Tensor]) -> Tensor:
    """x less its part in the span of an orthonormal basis; twice, as once leaves rounding of the size it removed."""
    for _ in range(2 if basis else 0):
        stacked = torch.stack(basis, 2)
        x = x - (stacked @ (stacked.mT @ x[..., None])).squeeze(-1)
    return x

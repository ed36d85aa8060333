"""Random chains of layers with batch norm, without learning, many at a time (paper (c), eq. 1 and appendix F).

``H_{l+1} = BN(W_l F(H_l))`` with Gaussian ``W_l`` and ``BN(M) = diag(M M^T)^(-1/2) M``: rows are units, columns
samples, no mean is subtracted. The weights' scale does not matter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def batch_norm(m: Tensor) -> Tensor:
    """Rows of norm 1; ``m [..., d, n]``."""
    return m / m.norm(dim=-1, keepdim=True)


def chain(
    h: Tensor, normalised: bool, generator: torch.Generator, activation: Callable[[Tensor], Tensor] | None = None
) -> Iterator[Tensor]:
    """``h [runs, d, n]``, then the representation after each layer, for ever. A row of the batch-normed has norm 1."""
    yield h
    d = h.shape[-2]
    for _ in itertools.count():
        w = torch.randn(*h.shape[:-1], d, generator=generator, dtype=h.dtype) / d**0.5
        h = w @ (h if activation is None else activation(h))
        if normalised:
            h = batch_norm(h)
        yield h


def nearly_parallel(runs: int, d: int, n: int) -> Tensor:
    """``H_0`` of the published code for figure 2: 1e-6 on the diagonal, but ``H_00 = 1``."""
    h = torch.zeros(d, n, dtype=torch.float64)
    h.fill_diagonal_(1e-6)
    h[0, 0] = 1.0
    return h.expand(runs, d, n)

"""The linear algebra of ``daneshmand2021``: weights that make a given representation more orthogonal.

For a representation ``H = U S V^T``, ``[d, n]`` with samples as columns,

    W = V' S^-p U^T / ||W H||_F,    p = 1/2 or 1,    V' [d_out, r],

where V' has orthonormal columns if d_out is at least the rank r. Then W H has the squared singular values
``s_i^(2 - 2 p)`` over their sum: for p = 1/2 they are closer to equal than H's ``s_i^2``, strictly unless all are
equal, and for p = 1 they are equal. With fewer outputs than the rank, V' has orthonormal rows instead; W H then has at
most d_out singular values, which bounds its orthogonality gap from below by ``sqrt(1 / d_out - 1 / n)``.

Everything is batched over leading dims: seeds, groups, parallel branches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from wnfused.linalg import economy_svd, orthogonal_batched, symmetric_eigh

# Singular values below eps max(d, n) s_max are rounding; for the very many columns of a convolution that product would
# throw away what is still accurate, so it is not let grow beyond this.
_LARGEST_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Representation:
    """What a weight is made of: left singular vectors ``u [..., d, m]``, singular values ``s [..., m]`` from the
    largest, ``m = min(d, n)``, and the rows ``v [..., rows, m]`` of V that belong to chosen samples."""

    u: Tensor
    s: Tensor
    v: Tensor
    tolerance: float

    @property
    def rank(self) -> Tensor:
        """How many singular values are above rounding, ``[...]``."""
        return (self.s > self.tolerance * self.s[..., :1]).sum(-1)


def represent(h: Tensor, rows: slice) -> Representation:
    """Of ``H [..., d, n]``, with V's rows of the samples ``rows``.

    By the full SVD for float64. Otherwise by the eigenvectors of the smaller Gram matrix in float64, where squaring
    costs half the digits and those left, 1e-8, are more than the data has.
    """
    if h.dtype == torch.float64:
        u, s, vt = economy_svd(h)
        return Representation(u, s, vt[..., :, rows].mT, _tolerance(h.dtype, h.shape[-2:]))
    if h.shape[-1] >= h.shape[-2]:
        return represent_columns([h], rows)
    wide = h.double()
    s, v = _eigen(wide.mT @ wide)
    u = wide @ v * _inverse(s).unsqueeze(-2)
    return Representation(u, s, v[..., rows, :], _tolerance(h.dtype, h.shape[-2:]))


def represent_columns(parts: Iterable[Tensor], rows: slice) -> Representation:
    """The same for ``H = [H_1, H_2, ...]`` with ``n >= d`` of float32 or less, given part by part.

    ``rows`` must lie in the first part.
    """
    gram, chosen, n = None, None, 0
    for part in parts:
        wide = part.double()
        if gram is None:
            gram, chosen, dtype = wide @ wide.mT, wide[..., rows], part.dtype
        else:
            gram += wide @ wide.mT
        n += part.shape[-1]
    assert gram is not None
    assert chosen is not None
    s, u = _eigen(gram)
    v = chosen.mT @ u * _inverse(s).unsqueeze(-2)
    return Representation(u, s, v, _tolerance(dtype, (gram.shape[-1], n)))


def _eigen(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values and vectors by a Gram matrix, from the largest."""
    squares, vectors = symmetric_eigh(gram)
    return squares.clamp(min=0).sqrt().flip(-1), vectors.flip(-1)


def _inverse(s: Tensor) -> Tensor:
    return torch.where(s > 0, 1 / torch.where(s > 0, s, 1.0), 0.0)


def _tolerance(dtype: torch.dtype, shape: Iterable[int]) -> float:
    return min(torch.finfo(dtype).eps * max(shape), _LARGEST_TOLERANCE)


def isotropic_weight(
    representation: Representation, out_features: int, *, kind: str = "polar", exponent: float = 0.5,
    directions: int | None = None, generator: torch.Generator | None = None,
) -> Tensor:  # fmt: skip
    """``W [..., d_out, d]`` in float64, with ``||W H||_F = 1``.

    Args:
        kind: ``"raw"``: V' is the chosen rows of V; ``"polar"``: the polar factor of that, the orthonormal matrix
            nearest to it. With fewer samples than ``d_out``, "polar" draws V' from the Haar distribution.
        exponent: p.
        directions: how many leading singular directions to use at most; all that are above rounding if None.

    Raises:
        ValueError: "raw" with fewer samples than ``d_out``.
    """
    u, s, v = representation.u, representation.s, representation.v
    used = representation.rank if directions is None else representation.rank.clamp(max=directions)
    if kind == "raw" and v.shape[-2] < out_features:
        raise ValueError(
            f"sample: {v.shape[-2]} columns are too few for slice='raw' and {out_features} outputs; use a larger "
            "sample or slice='polar'"
        )
    weight = u.new_zeros(*u.shape[:-2], out_features, u.shape[-2])
    for rank in used.unique().tolist():  # one, as good as always
        here = used == rank
        leading = _left(v[here][..., :rank], out_features, kind, generator)
        weight[here] = leading * s[here][..., None, :rank].pow(-exponent) @ u[here][..., :rank].mT
    # ||W H||_F = ||W U S||_F.
    norm = torch.linalg.matrix_norm(weight @ u * s.unsqueeze(-2), keepdim=True)
    return weight * _inverse(norm)


def _left(v: Tensor, out_features: int, kind: str, generator: torch.Generator | None) -> Tensor:
    """V' ``[..., d_out, r]``."""
    if kind == "raw":
        return v
    if v.shape[-2] < out_features:
        return orthogonal_batched(v.new_empty(*v.shape[:-2], out_features, v.shape[-1]), generator=generator)
    left, _, right = economy_svd(v)
    return left @ right


def patches(
    x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...], groups: int
) -> Tensor:
    """What a convolution multiplies its weights with: ``[groups, c_in / groups * prod(kernel), N * positions]``.

    ``x [N, c_in, *spatial]`` is padded already.
    """
    spatial = len(kernel)
    for d in range(spatial):
        reach = dilation[d] * (kernel[d] - 1) + 1
        x = x.unfold(2 + d, reach, stride[d])[..., :: dilation[d]]
    # [N, c_in, *positions, *kernel] -> [groups, c_in / groups, *kernel, N, *positions]
    n, c_in = x.shape[:2]
    x = x.reshape(n, groups, c_in // groups, *x.shape[2:])
    positions, taps = range(3, 3 + spatial), range(3 + spatial, 3 + 2 * spatial)
    x = x.permute(1, 2, *taps, 0, *positions)
    return x.reshape(groups, c_in // groups * math.prod(kernel), -1)

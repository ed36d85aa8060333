"""How far the representations of different samples are from orthogonal, layer by layer.

With the representations of n samples as the columns of ``H [d, n]`` and its singular values scaled to
``sum s_i^2 = 1``,

    V(H) = || H^T H / ||H||_F^2 - I_n / n ||_F = sqrt(sum s_i^4 - 1/n),

0 for orthogonal columns of one length and ``sqrt(1 - 1/n)`` for rank 1. Batch norm makes it fall with depth, plain
random layers let it rise (Daneshmand, Joudaki & Bach 2021). Their bounds, for linear layers with Gaussian weights
followed by batch norm without mean, of width d, with ``alpha <= s_n^2`` in every layer:

    Theorem 1:  E V(H_{l+1}) <= 2 (1 - 2 alpha / 3)^l + 3 n / (alpha sqrt d)
    Lemma 2:    W2(law(W H), law(G / sqrt n))^2 <= 2 n E V(H),    W, G Gaussian with variance 1/d
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from wnfused._modules import Filter
from wnfused._numbers import number, positive
from wnfused.diagnostics.arguments import check_inputs, check_model, floats
from wnfused.diagnostics.drawing import THEORY, Drawable, key, over_stations
from wnfused.diagnostics.progress import Progress, advancing
from wnfused.diagnostics.state import outputs_of, undisturbed
from wnfused.diagnostics.stations import Call, observed


def orthogonality_gap(h: Tensor) -> Tensor:
    """``V(H)`` for ``h [..., d, n]``, whose columns are samples: ``[...]`` in float64. NaN for ``H = 0``, and for one
    that has NaN or inf.

    With fewer dimensions than samples it is at least ``sqrt(1/d - 1/n)``.

    Raises:
        TypeError: ``h`` is no dense tensor of real numbers.
        ValueError: it has fewer than two dims, or d or n is 0.
    """
    return _gap(_gram(h), h.shape[-1])


def gaussian_distance(h: Tensor) -> Tensor:
    """``W2(law(W H), law(G / sqrt n))^2 = sum_i (s_i - 1/sqrt n)^2`` for fixed ``h [..., d, n]``: ``[...]`` in float64.

    Exact: the rows of both are Gaussian, with covariances ``H^T H / d`` and ``I / (n d)`` that commute. H is scaled to
    ``||H||_F = 1``. Lemma 2 bounds it by ``2 n V(H)``.

    Raises:
        TypeError, ValueError: as ``orthogonality_gap``.
    """
    return _distance(_squared_singular_values(_gram(h), h.shape[-1]))


def gap_bound(layers: ArrayLike, samples: int, width: int, alpha: float) -> np.ndarray:
    """Theorem 1's bound on ``E V(H_{l+1})``, ``2 (1 - 2 alpha / 3)^l + 3 n / (alpha sqrt d)``.

    Args:
        layers: l, an int or an array of them, at least 0.
        samples: n.
        width: d.
        alpha: a lower bound of ``s_n^2`` in every layer, above 0 and at most ``1 / n``.

    Returns:
        The shape of ``layers``, float64.

    Raises:
        TypeError: ``layers`` are no numbers, or ``alpha`` is none.
        ValueError: a number out of these ranges.
    """
    positive(samples=samples, width=width)
    number(alpha=alpha)
    if not 0 < alpha <= 1 / samples:
        raise ValueError(f"alpha: {alpha} must be above 0 and at most 1/samples = {1 / samples:.3g}, as s_n^2 is")
    l = floats("layers", layers)  # noqa: E741
    if not (l >= 0).all():
        raise ValueError(f"layers: {layers!r} must be at least 0")
    return 2 * (1 - 2 * alpha / 3) ** l + 3 * samples / (alpha * width**0.5)


def stationary_gap(h: Tensor, expected: Tensor) -> Tensor:
    """``L(Q) = || Q^T Q / d - expected ||_F`` for ``h [..., d, n]`` and ``expected [n, n]``, the mean of
    ``Q^T Q / d`` over many layers: the gap of layers with an activation (appendix F). ``[...]`` in float64.

    Raises:
        TypeError: ``h`` or ``expected`` is no dense tensor of real numbers.
        ValueError: ``h`` is not ``[..., d, n]``, or ``expected`` does not fit or is on another device.
    """
    d, n = _columns(h)
    _check_real("expected", expected)
    if expected.shape[-2:] != (n, n):
        raise ValueError(f"expected: shape {list(expected.shape)} does not fit; use [{n}, {n}]")
    if expected.device != h.device:
        raise ValueError(f"expected: is on {expected.device}, h on {h.device}; use one device")
    h = h.double()
    return torch.linalg.matrix_norm(h.mT @ h / d - expected.double())


@dataclass(frozen=True, eq=False)
class OrthogonalityProfile(Drawable):
    """What ``orthogonality`` found at L stations.

    Attributes:
        names: of the stations.
        gap: ``V(H) [L]``.
        distance: the squared Wasserstein distance of Lemma 2 ``[L]``.
        smallest: ``s_n^2`` ``[L]``, the smallest squared singular value where their sum is 1; Theorem 1's alpha is at
            most its minimum.
        widths: d of each station ``[L]``.
        samples: n.
    """

    names: tuple[str, ...]
    gap: np.ndarray
    distance: np.ndarray
    smallest: np.ndarray
    widths: np.ndarray
    samples: int

    panels = 2

    @property
    def distance_bound(self) -> np.ndarray:
        """Lemma 2's ``2 n V(H)`` ``[L]``."""
        return 2 * self.samples * self.gap

    def gap_bound(self) -> np.ndarray | None:
        """Theorem 1's bound ``[L]`` with the largest alpha that the measured layers allow and the smallest width; None
        where some layer's samples are linearly dependent, of which the theorem says nothing."""
        alpha = float(self.smallest.min(initial=np.inf))
        if not 1e-12 < alpha < np.inf:
            return None
        return gap_bound(np.arange(len(self.gap)), self.samples, int(self.widths.min()), min(alpha, 1 / self.samples))

    def _draw(self, axes: Sequence[Any], label: str | None) -> None:
        left, right = axes
        over_stations(left, self.gap, label)
        left.set_ylabel("orthogonality gap $V(H_l)$")
        bound = self.gap_bound()
        if bound is not None and bound.min() < 10:
            left.plot(np.arange(1, len(bound) + 1), bound, color=THEORY, linestyle="--", label="Theorem 1")
        left.axhline((1 - 1 / self.samples) ** 0.5, color=THEORY, linewidth=1, linestyle="-", label="rank one")
        line = over_stations(right, self.distance, label)
        x = np.arange(1, len(self.gap) + 1)
        right.plot(x, self.distance_bound, color=line.get_color(), linestyle=":", linewidth=1.2)
        key(right, "Lemma 2: $2 n V$")
        right.set_ylabel(r"$W_2^2$ of $W H_l$ to a Gaussian")


@torch.no_grad()
def orthogonality(
    model: nn.Module, inputs: Tensor, *, filter: Filter | None = None, progress: Progress = False
) -> OrthogonalityProfile:
    """The gap of the representations of ``inputs [n, ...]`` at every station, each flattened to ``[d, n]``.

    One forward pass, in the mode the model is in: batch norm orthogonalises in train mode. Of each station only its
    Gram matrix of the smaller side is made, in float64, and not kept.

    Args:
        inputs: ``[n, ...]``, of any dtype that the model takes.
        filter: which modules are stations, see ``wnfused.diagnostics.stations``.
        progress: True for a bar on the terminal, or a function of (stations done, None).

    Raises:
        TypeError, ValueError: naming the argument; ``n`` must be at least 2.
    """
    check_model(model)
    check_inputs(inputs)
    if len(inputs) < 2:
        raise ValueError("inputs: 1 sample has nothing to be orthogonal to; use at least 2")
    names: list[str] = []
    rows: list[tuple[float, float, float, int]] = []

    with undisturbed(model), advancing(progress, "orthogonality", None) as advance:

        def observe(call: Call) -> None:
            h = call.output.reshape(len(inputs), -1).T
            gram = _gram(h)
            values = _squared_singular_values(gram, len(inputs))
            names.append(call.name)
            rows.append((_gap(gram, len(inputs)).item(), _distance(values).item(), values[-1].item(), len(h)))
            advance()

        with observed(model, observe, filter, len(inputs)):
            outputs_of(model, inputs)
    gap, distance, smallest, widths = (np.array([row[i] for row in rows]) for i in range(4))
    return OrthogonalityProfile(tuple(names), gap, distance, smallest, widths, len(inputs))


def _check_real(name: str, h: Tensor) -> None:
    if not isinstance(h, Tensor):
        raise TypeError(f"{name}: expected a Tensor, got {type(h).__name__}")
    if h.is_complex() or h.layout is not torch.strided:
        raise TypeError(f"{name}: expected a dense tensor of real numbers, got {h.dtype}, {h.layout}")


def _columns(h: Tensor) -> tuple[int, int]:
    _check_real("h", h)
    if h.dim() < 2 or 0 in h.shape[-2:]:
        raise ValueError(f"h: shape {list(h.shape)} is not [..., d, n] with d, n >= 1")
    return h.shape[-2], h.shape[-1]


def _gram(h: Tensor) -> Tensor:
    """``H^T H / ||H||_F^2`` or ``H H^T / ||H||_F^2``, whichever is smaller."""
    d, n = _columns(h)
    h = h.double()
    # Scaled to a largest entry of 1: the squares of an exploding network overflow.
    h = h / h.abs().amax((-2, -1), keepdim=True)
    gram = h.mT @ h if n <= d else h @ h.mT
    return gram / gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]


def _gap(gram: Tensor, n: int) -> Tensor:
    if gram.shape[-1] == n:
        return torch.linalg.matrix_norm(gram - torch.eye(n, dtype=gram.dtype, device=gram.device) / n)
    # Of H H^T: V^2 is at least 1/d - 1/n, so the difference loses nothing.
    return (gram.square().sum((-2, -1)) - 1 / n).sqrt()


def _squared_singular_values(gram: Tensor, n: int) -> Tensor:
    """All n of them, falling, with sum 1; NaN for ``H = 0`` or one that is not finite."""
    finite = gram.isfinite().flatten(-2).all(-1)[..., None]
    values = torch.linalg.eigvalsh(torch.where(finite[..., None], gram, 0.0)).clamp(min=0).flip(-1)
    values = torch.nn.functional.pad(values, (0, n - values.shape[-1]))
    return torch.where(finite, values, float("nan"))


def _distance(values: Tensor) -> Tensor:
    n = values.shape[-1]
    return (values.sqrt() - n**-0.5).square().sum(-1)

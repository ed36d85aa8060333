"""How alike a network sees different samples, layer by layer.

For samples i < j with representations ``h_i, h_j`` at a station, ``cos_ij = <h_i, h_j> / (||h_i|| ||h_j||)``. In deep
random networks without normalisation all directions merge, |cos| -> 1; under batch norm they part (figure 1 of
Daneshmand, Joudaki & Bach 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wnfused._modules import Filter
from wnfused.diagnostics.arguments import check_inputs, check_model
from wnfused.diagnostics.drawing import Drawable, over_stations
from wnfused.diagnostics.progress import Progress, advancing
from wnfused.diagnostics.state import outputs_of, undisturbed
from wnfused.diagnostics.stations import Call, observed

QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True, eq=False)
class SimilarityProfile(Drawable):
    """What ``similarity`` found at L stations, over all pairs of samples.

    Attributes:
        names: of the stations.
        absolute_cosine: mean of ``|cos|`` ``[L]``.
        cosine: mean of ``cos`` ``[L]``.
        quantiles: the 5%, 50% and 95% quantiles of ``|cos|`` ``[L, 3]``.
        samples: n.
    """

    names: tuple[str, ...]
    absolute_cosine: np.ndarray
    cosine: np.ndarray
    quantiles: np.ndarray
    samples: int

    def _draw(self, axes: Sequence[Any], label: str | None) -> None:
        (axis,) = axes
        line = over_stations(axis, self.absolute_cosine, label, log=False)
        x = np.arange(1, len(self.names) + 1)
        axis.fill_between(x, *self.quantiles[:, [0, 2]].T, color=line.get_color(), alpha=0.15, linewidth=0)
        axis.set_ylim(0, 1.02)
        axis.set_ylabel(r"$|\cos|$ between samples" + "\n(mean; band: 5% to 95% of the pairs)")


@torch.no_grad()
def similarity(
    model: nn.Module, inputs: Tensor, *, filter: Filter | None = None, progress: Progress = False
) -> SimilarityProfile:
    """Cosines between the representations of ``inputs [n, ...]`` at every station, each flattened; in float64.

    One forward pass, in the mode the model is in. A representation of 0 has cosine 0 with every other.

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
        raise ValueError("inputs: 1 sample has nothing to be like; use at least 2")
    names: list[str] = []
    rows: list[tuple[float, ...]] = []

    with undisturbed(model), advancing(progress, "similarity", None) as advance:

        def observe(call: Call) -> None:
            cosines = _cosines(call.output).cpu().numpy()
            sizes = np.abs(cosines)
            names.append(call.name)
            # torch.quantile takes no more than 2^24 numbers, the pairs of 5793 samples.
            rows.append((sizes.mean(), cosines.mean(), *np.quantile(sizes, QUANTILES)))
            advance()

        with observed(model, observe, filter, len(inputs)):
            outputs_of(model, inputs)
    table = np.array(rows, dtype=float).reshape(-1, 5)
    return SimilarityProfile(tuple(names), table[:, 0], table[:, 1], table[:, 2:], len(inputs))


def _cosines(output: Tensor) -> Tensor:
    """Of all pairs, flat."""
    h = output.reshape(len(output), -1).double()
    # Scaled first: the squares of an exploding network overflow.
    h = F.normalize(h / h.abs().amax(1, keepdim=True).clamp(min=torch.finfo(h.dtype).tiny), eps=0.0)
    h = h.nan_to_num(nan=0.0) if output.isfinite().all() else h
    above = torch.triu_indices(len(h), len(h), 1, device=h.device)
    return (h @ h.T)[above[0], above[1]]

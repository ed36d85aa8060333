"""Jacobians layer by layer: each station's own, and how far the product of all has grown.

``layer_jacobians`` takes the singular values of every station's Jacobian at the input it really gets.
``jacobian_growth`` pushes random tangents through the network and reads their length at every station,

    growth_l = ||J_{0->l}||_F^2 / d_l = E ||J_{0->l} v||^2 / d_l  for E v v^T = I,

the mean eigenvalue of ``J J^T`` from the input to station l: ``chi^l`` in a wide random network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from wnfused._modules import Filter
from wnfused._numbers import positive
from wnfused.diagnostics.arguments import (
    check_by_sample,
    check_differentiable,
    check_inputs,
    check_model,
    gaussian,
    seeded,
)
from wnfused.diagnostics.drawing import THEORY, Drawable, over_stations
from wnfused.diagnostics.jacobian import METHODS, Products, check_independent, finite_samples, spectrum
from wnfused.diagnostics.progress import Progress, advancing
from wnfused.diagnostics.state import outputs_of, undisturbed
from wnfused.diagnostics.stations import Call, observed

# Of the largest singular value where J is too large to write out: a picture over many layers needs no more.
_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class LayerJacobians(Drawable):
    """What ``layer_jacobians`` found at L stations; all values are means over the samples.

    Attributes:
        names: of the stations.
        largest: singular value ``[L]``; good to about 0.1% where J was too large to write out.
        smallest: singular value ``[L]``; NaN where J was too large to write out.
        mean: of the eigenvalues of ``J J^T`` ``[L]``: the layer's chi.
        variance: of the same eigenvalues ``[L]``.
    """

    names: tuple[str, ...]
    largest: np.ndarray
    smallest: np.ndarray
    mean: np.ndarray
    variance: np.ndarray

    def _draw(self, axes: Sequence[Any], label: str | None) -> None:
        (axis,) = axes
        line = over_stations(axis, np.sqrt(self.mean), label)
        x = np.arange(1, len(self.names) + 1)
        # A rank-deficient J has a smallest singular value of 0, or of rounding's size, which no axis should show.
        low = np.where(self.smallest > 1e-4 * self.largest, self.smallest, np.nan)
        axis.fill_between(x, low, self.largest, color=line.get_color(), alpha=0.15, linewidth=0)
        for bound in (low, self.largest):
            axis.plot(x, bound, color=line.get_color(), linewidth=0.8, linestyle=":")
        axis.axhline(1, color=THEORY, linewidth=1, linestyle=":")
        axis.set_ylabel("singular values of each layer's $J$\n(root mean square; band: smallest to largest)")


def layer_jacobians(
    model: nn.Module, inputs: Tensor, *, method: str = "auto", probes: int = 8, filter: Filter | None = None,
    generator: torch.Generator | None = None, progress: Progress = False,
) -> LayerJacobians:  # fmt: skip
    """Singular values of every station's own Jacobian, from its input to its output, at the samples ``inputs``.

    One forward pass; each station is differentiated while it runs and its graph dropped, so that memory does not grow
    with depth. NaN where a station's output is not finite for some sample.

    Args:
        method, probes, generator: as in ``wnfused.diagnostics.jacobian_spectrum``.
        filter: which modules are stations, see ``wnfused.diagnostics.stations``.
        progress: True for a bar on the terminal, or a function of (stations done, None).

    Raises:
        TypeError, ValueError, RuntimeError: as ``wnfused.diagnostics.jacobian_spectrum``.
    """
    check_model(model)
    check_inputs(inputs)
    check_independent(model)
    check_differentiable()
    positive(probes=probes)
    if method not in METHODS:
        raise ValueError(f"method: unknown {method!r}; use one of {', '.join(METHODS)}")
    generator = seeded(generator)
    names: list[str] = []
    rows: list[tuple[float, ...]] = []

    with undisturbed(model), torch.no_grad(), advancing(progress, "layers' Jacobians", None) as advance:

        def observe(call: Call) -> None:
            if not (call.input.is_floating_point() and call.output.is_floating_point()):
                return
            check_by_sample(f"filter: the input of {call.name!r}", call.input, len(inputs))
            with torch.enable_grad():
                x = call.input.detach().clone().requires_grad_()
                # A copy for the call: a layer may write its input in place.
                found = spectrum(Products(x, call.run(x.clone())), method, 1, probes, generator, False, _TOLERANCE)
            values = found.singular_values
            smallest = values[:, -1].mean() if found.exact else np.nan
            names.append(call.name)
            rows.append((values[:, 0].mean(), smallest, found.mean.mean(), found.variance.mean()))
            advance()

        with observed(model, observe, filter, len(inputs), as_given=True):
            outputs_of(model, inputs)
    table = np.array(rows, dtype=float).reshape(-1, 4)
    return LayerJacobians(tuple(names), *table.T)


@dataclass(frozen=True, eq=False)
class JacobianGrowth(Drawable):
    """What ``jacobian_growth`` found at L stations.

    Attributes:
        names: of the stations.
        growth: ``||J_{0->l}||_F^2 / d_l``, estimated, mean over the samples ``[L]``.
        spread: standard deviation over samples and probes ``[L]``.
    """

    names: tuple[str, ...]
    growth: np.ndarray
    spread: np.ndarray

    def _draw(self, axes: Sequence[Any], label: str | None) -> None:
        (axis,) = axes
        over_stations(axis, np.where(self.growth > 0, self.growth, np.nan), label)
        axis.axhline(1, color=THEORY, linewidth=1, linestyle=":")
        axis.set_ylabel(r"mean eigenvalue of $J_{0\to l} J_{0\to l}^T$")


def jacobian_growth(
    model: nn.Module, inputs: Tensor, *, probes: int = 4, filter: Filter | None = None,
    generator: torch.Generator | None = None, progress: Progress = False,
) -> JacobianGrowth:  # fmt: skip
    """The mean eigenvalue of ``J J^T`` from the input to every station, by forward-mode derivatives.

    ``probes`` passes, each with one random tangent a sample; nothing is kept of a station but two numbers, so that
    memory does not grow with depth. NaN where a station's output is not finite for some sample.

    Args:
        inputs: ``[n, ...]``, floating point.
        generator: of the tangents; default: seeded with 0.
        filter: which modules are stations, see ``wnfused.diagnostics.stations``.
        progress: True for a bar on the terminal, or a function of (stations done, None).

    Raises:
        TypeError, ValueError, RuntimeError: as ``wnfused.diagnostics.jacobian_spectrum``.
    """
    check_model(model)
    check_inputs(inputs)
    check_independent(model)
    check_differentiable()
    positive(probes=probes)
    if not inputs.is_floating_point():
        raise TypeError(f"inputs: {inputs.dtype} has no derivatives; use a floating-point tensor")
    generator = seeded(generator)
    names: list[str] = []
    lengths: list[Tensor] = []

    with undisturbed(model), torch.no_grad(), advancing(progress, "Jacobian", None) as advance:

        def observe(call: Call) -> None:
            output, tangent = forward_ad.unpack_dual(call.output)
            length = torch.zeros(len(inputs), dtype=torch.float64, device="cpu")
            if tangent is not None:
                length = tangent.reshape(len(inputs), -1).double().square().mean(1).cpu()
            names.append(call.name)
            lengths.append(torch.where(finite_samples(output).cpu(), length, torch.nan))
            advance()

        for _ in range(probes):
            # Signs: of all probes with E v v^T = I those whose squares scatter least.
            tangent = gaussian(inputs.shape, generator, inputs).sign().to(inputs.dtype)
            with forward_ad.dual_level(), observed(model, observe, filter, len(inputs)):
                outputs_of(model, forward_ad.make_dual(inputs.detach(), tangent))
    stations = len(names) // probes
    table = torch.stack(lengths).reshape(probes, stations, -1) if lengths else torch.zeros(1, 0, 1).double()
    flat = table.transpose(0, 1).flatten(1).numpy()
    return JacobianGrowth(tuple(names[:stations]), flat.mean(1), flat.std(1))

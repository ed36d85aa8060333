"""How large activations and gradients are, layer by layer: what an initialisation is judged by.

At station ``l`` of a network, with outputs ``h^l_i`` and loss ``l_i`` of sample i, the norms are ``||h^l_i||_2`` and
``||d l_i / d h^l_i||_2``, the quantities of figure 1 of Arpit, Campos & Bengio (2019). Their initialisation keeps
both, in expectation. With ``P_l`` positions and ``C_l`` channels at station l (1 and the width, for a vector),
``B_k`` residual blocks in stage k, and stations 0 (the first) to L (the last before the head),

    E ||h^l||^2 = ||h^0||^2  (P_l / P_0)  prod_{blocks up to l} (1 + 1/B_k)
    E ||dl/dh^l||^2 = ||dl/dh^L||^2  (C_l / C_L)  prod_{blocks after l} (1 + 1/B_k)

so that a stage multiplies a norm by ``(1 + 1/B)^(B/2)``, which lies in ``[sqrt 2, sqrt e]`` whatever its depth
(theorems 3 and 4); without blocks the norm of a vector stays (theorem 1, ``K_n = 1``) and a gradient goes with
``n_l / n_L``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm

from wnfused._modules import Filter
from wnfused._numbers import function, plain_int
from wnfused.diagnostics.arguments import (
    Loss,
    check_by_sample,
    check_differentiable,
    check_inputs,
    check_logits,
    check_model,
    check_targets,
    checked_loss,
    cross_entropy,
)
from wnfused.diagnostics.drawing import THEORY, Drawable, over_stations
from wnfused.diagnostics.progress import Progress, advancing
from wnfused.diagnostics.state import outputs_of, undisturbed
from wnfused.diagnostics.stations import BLOCKS, Call, default_filter, observed
from wnfused.nn import WeightNormalised, WNResidualBlock, WNResidualStage

_FLOAT32_LARGEST = 3.4e38


@dataclass(frozen=True)
class Norms:
    """One station: means over the samples. ``gradient`` is NaN where the loss does not depend on it."""

    name: str
    activation: float
    gradient: float


@dataclass(frozen=True, eq=False)
class NormProfile(Drawable):
    """What ``layer_norms`` found for n samples at L stations. A sequence of ``Norms``; slices are profiles.

    Attributes:
        names: of the stations.
        activations: ``||h^l_i||`` ``[L, n]``.
        gradients: ``||d l_i / d h^l_i||`` ``[L, n]``; NaN where the loss does not depend on the station.
        inputs: ``||x_i||`` ``[n]``.
        channels: second dimension of each output ``[n, channels, ...]``, 1 where there is none ``[L]``.
        positions: product of each output's further dimensions ``[L]``.
        blocks: ``B_k`` where the station is a residual block of a stage of so many, else 0 ``[L]``.
        log_growth: of all blocks up to each station, those that no filter took, too, the sum of ``log(1 + 1/B_k)``
            ``[L]``.
        stages: of the same blocks the sum of ``1/B_k`` ``[L]``.
        head: whether the theory leaves a station out: plain layers at the end, after normalised ones or blocks ``[L]``.
    """

    names: tuple[str, ...]
    activations: np.ndarray
    gradients: np.ndarray
    inputs: np.ndarray
    channels: np.ndarray
    positions: np.ndarray
    blocks: np.ndarray
    log_growth: np.ndarray
    stages: np.ndarray
    head: np.ndarray

    panels = 2

    @property
    def heads(self) -> int:
        """How many stations the theory leaves out."""
        return int(self.head.sum())

    @property
    def activation(self) -> np.ndarray:
        """Means over the samples ``[L]``."""
        return self.activations.mean(1)

    @property
    def gradient(self) -> np.ndarray:
        """Means over the samples ``[L]``."""
        return self.gradients.mean(1)

    def expected_activation(self) -> np.ndarray:
        """The theory's norms ``[L]``, from the mean norm that was measured at the first station; NaN at heads."""
        if self.head.all():
            return np.full(len(self), np.nan)
        first = int(self.head.argmin())
        squares = self.positions / self.positions[first] * np.exp(self.log_growth - self.log_growth[first])
        return self._without_heads(self.activation[first] * np.sqrt(squares))

    def expected_gradient(self) -> np.ndarray:
        """The theory's norms ``[L]``, from the mean norm that was measured at the last station before the heads."""
        if self.head.all():
            return np.full(len(self), np.nan)
        last = self._last()
        squares = self.channels / self.channels[last] * np.exp(self.log_growth[last] - self.log_growth)
        return self._without_heads(self.gradient[last] * np.sqrt(squares))

    def activation_band(self) -> tuple[np.ndarray, np.ndarray]:
        """``expected_activation`` for stages that multiply by ``sqrt 2``, their least, and ``sqrt e``, their most."""
        return self._band(self.expected_activation(), backward=False)

    def gradient_band(self) -> tuple[np.ndarray, np.ndarray]:
        """``expected_gradient`` for stages that multiply by ``sqrt 2`` and ``sqrt e``."""
        return self._band(self.expected_gradient(), backward=True)

    def _last(self) -> int:
        """The last station that is no head."""
        return len(self) - 1 - int(self.head[::-1].argmin())

    def _without_heads(self, values: np.ndarray) -> np.ndarray:
        return np.where(self.head, np.nan, values)

    def _band(self, expected: np.ndarray, backward: bool) -> tuple[np.ndarray, np.ndarray]:
        """Block b of B is share 1/B of its stage's growth, which is 2^(1/2) to e^(1/2) instead of (1 + 1/B)^(B/2)."""
        if self.head.all():
            return expected, expected
        end = self._last() if backward else int(self.head.argmin())
        share, growth = ((c[end] - c if backward else c - c[end]) for c in (self.stages, self.log_growth))
        ends = [expected * np.exp((rate * share - growth) / 2) for rate in (np.log(2), 1.0)]
        return np.minimum(*ends), np.maximum(*ends)  # of a profile turned round the rates change places

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, which: int) -> Norms: ...
    @overload
    def __getitem__(self, which: slice) -> NormProfile: ...
    def __getitem__(self, which: int | slice) -> Norms | NormProfile:
        if isinstance(which, slice):
            by_station = (field.name for field in fields(self) if field.name != "inputs")
            return replace(self, **{name: getattr(self, name)[which] for name in by_station})
        which = plain_int(which)
        if not isinstance(which, int):
            raise TypeError(f"station: expected its number or a slice, got {which!r}")
        if not -len(self) <= which < len(self):
            raise IndexError(f"station {which} is out of range: {len(self)} were measured")
        return Norms(self.names[which], float(self.activation[which]), float(self.gradient[which]))

    def __iter__(self) -> Iterator[Norms]:
        return (self[i] for i in range(len(self)))

    def _draw(self, axes: Sequence[Any], label: str | None) -> None:
        panels = (
            (self.activation, self.activation_band, r"activation norm  $\|h^l\|$"),
            (self.gradient, self.gradient_band, r"gradient norm  $\|\partial\ell/\partial h^l\|$"),
        )
        for axis, (values, band, name) in zip(axes, panels, strict=True):
            # A head's few logits are another quantity: their norm would only squeeze the axis.
            values = self._without_heads(values)
            over_stations(axis, np.where(np.isfinite(values) & (values > 0), values, np.nan), label)
            low, high = band()
            growth = r": a stage multiplies norms by $\sqrt{2}$ to $\sqrt{e}$" if self.blocks.any() else ""
            name_of_band = f"theory of arpit2019's start{growth}"
            # Lines of other initialisations start where they start: one band, the first one's, says enough.
            if not any(patch.get_gid() == "theory" for patch in axis.collections):
                x = np.arange(1, len(values) + 1)
                patch = axis.fill_between(
                    x, low, high, color=THEORY, alpha=0.3, linewidth=1.5, zorder=0, label=name_of_band
                )
                patch.set_gid("theory")
            _mark_overflow(axis, values)
            axis.set_ylabel(f"{name}\n(mean over samples)")


def layer_norms(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor | None = None,
    *,
    loss: Loss | None = None,
    filter: Filter | None = None,
    progress: Progress = False,
) -> NormProfile:
    """One forward and backward pass, measured at every station; the model and its ``.grad`` stay as they are.

    Norms are taken in float64 as each output, and each gradient, appears. Beyond what autograd keeps for a backward
    pass towards the activations, memory grows by two numbers for each station and sample.

    Args:
        inputs: ``[n, ...]``, of any dtype; where it is an integer one, gradients are taken from the first station on.
        targets: whatever ``loss`` takes as its second argument, for the cross-entropy classes in int64 or
            probabilities; None: the class that the model itself holds for likeliest, for each sample.
        loss: from (outputs, targets) to the *sum* of the samples' losses, so that a sample's gradient does not depend
            on how many there are; default: cross-entropy.
        filter: which modules are stations, see ``wnfused.diagnostics.stations``. The theory's norms count the
            blocks that it leaves out, too.
        progress: True for a bar on the terminal, or a function of (steps done, None): forward and backward.

    Raises:
        TypeError, ValueError: naming the argument that cannot work.
        RuntimeError: inside of ``torch.inference_mode()``.
    """
    check_model(model)
    check_inputs(inputs)
    check_differentiable()
    function(loss=loss)
    if targets is not None and loss is None:
        check_targets(targets, inputs)
    function(filter=filter)
    record = _Record(model, filter, len(inputs))
    with undisturbed(model), torch.enable_grad(), advancing(progress, "norms", None) as record.advance:
        x = inputs.detach()
        if x.is_floating_point():
            x = x.clone().requires_grad_()
            record.leaves.append(x)
        with observed(model, record.take, record.seen):
            outputs = outputs_of(model, x)
        if targets is None:
            check_logits(outputs, "a loss" if loss is None else "targets")
            targets = outputs.detach().argmax(1)
        total = checked_loss(loss or cross_entropy, outputs, targets)
        # Towards activations alone: no parameter's .grad is touched.
        if total.requires_grad:
            torch.autograd.grad(total, record.leaves, allow_unused=True)
    return record.profile(inputs)


class _Record:
    """What the stations showed, in order of execution."""

    def __init__(self, model: nn.Module, filter: Filter | None, samples: int) -> None:
        self.names: list[str] = []
        self.blocks: list[int] = []
        self.grown: list[tuple[float, float]] = []
        self.shapes: list[tuple[int, int]] = []
        self.activations: list[Tensor] = []
        self.gradients: dict[int, Tensor] = {}
        self.leaves: list[Tensor] = []
        self.advance = lambda: None
        self._modules = dict(model.named_modules())
        self._default, self._samples = default_filter(model), samples
        self._chosen = {name for name, module in self._modules.items() if (filter or self._default)(name, module)}
        self._log_growth = self._stages = 0.0

    def seen(self, name: str, module: nn.Module) -> bool:
        """Which modules to observe: the stations, and blocks that are none, for the theory."""
        is_block = isinstance(module, (*BLOCKS, WNResidualStage)) and self._default(name, module)
        return name in self._chosen or is_block

    def take(self, call: Call) -> Tensor | None:
        """Measure the output now, and its gradient when the backward pass comes by."""
        owner = self._owner(call.name)
        blocks = self._blocks_beside(owner)
        if blocks:
            self._log_growth += math.log1p(1 / blocks)
            self._stages += 1 / blocks
        if owner not in self._chosen:
            return None
        check_by_sample(f"filter: the output of {call.name!r}", call.output, self._samples)
        output, station, replaced = call.output, len(self.names), False
        self.names.append(call.name)
        self.blocks.append(blocks)
        self.grown.append((self._log_growth, self._stages))
        channels = output.shape[1] if output.dim() > 1 else 1
        self.shapes.append((channels, output[0].numel() // max(channels, 1)))
        self.activations.append(_norms(output))
        self.advance()
        if not output.requires_grad and output.is_floating_point():
            # Nothing before it has a gradient, integers or what a model cuts off: one starts here, from a copy, which
            # may be written in place.
            self.leaves.append(output.detach().requires_grad_())
            output, replaced = self.leaves[-1].clone(), True
        if output.requires_grad:

            def measure(gradient: Tensor) -> None:
                self.gradients[station] = _norms(gradient)
                self.advance()

            output.register_hook(measure)
        return output if replaced else None

    def profile(self, inputs: Tensor) -> NormProfile:
        n = len(inputs)
        nothing = torch.full((n,), float("nan"), dtype=torch.float64, device="cpu")
        gradients = [self.gradients.get(i, nothing) for i in range(len(self.names))]
        log_growth, stages = np.array(self.grown, dtype=float).reshape(-1, 2).T
        return NormProfile(
            tuple(self.names), _table(self.activations, n), _table(gradients, n), _norms(inputs).numpy(),
            np.array([c for c, _ in self.shapes], dtype=int), np.array([p for _, p in self.shapes], dtype=int),
            np.array(self.blocks, dtype=int), log_growth, stages, self._head(),
        )  # fmt: skip

    def _owner(self, station: str) -> str:
        """The name of the module that a station is, or is a block of."""
        return station if station in self._modules else station.rpartition(".blocks.")[0]

    def _blocks_beside(self, name: str) -> int:
        """How many blocks the stage has that a module is a block of, or is; 0 for other modules."""
        module = self._modules[name]
        if isinstance(module, (WNResidualBlock, WNResidualStage)):
            return module.num_blocks
        if not isinstance(module, BLOCKS):
            return 0
        siblings = self._modules[name.rpartition(".")[0]].children()
        return sum(isinstance(sibling, BLOCKS) for sibling in siblings)

    def _head(self) -> np.ndarray:
        """Which stations are the plain layers that end the network; none of a network that has no others."""
        modules = [self._modules[self._owner(name)] for name in self.names]
        inner = [i for i, m in enumerate(modules) if self.blocks[i] or _is_weight_normalised(m)]
        return np.arange(len(modules)) > inner[-1] if inner else np.zeros(len(modules), dtype=bool)


def _is_weight_normalised(module: nn.Module) -> bool:
    """By this package or by either way of torch's."""
    steps = list(module._forward_pre_hooks.values())
    if parametrize.is_parametrized(module):
        steps += module.parametrizations.modules()  # type: ignore[union-attr]
    return isinstance(module, WeightNormalised) or any(isinstance(step, (WeightNorm, _WeightNorm)) for step in steps)


def _norms(x: Tensor) -> Tensor:
    """Of each sample, in float64 on the CPU."""
    return torch.linalg.vector_norm(x.detach().reshape(len(x), -1).double(), dim=1).cpu()


def _table(rows: list[Tensor], n: int) -> np.ndarray:
    return torch.stack(rows).numpy() if rows else np.empty((0, n))


def _mark_overflow(axis: Any, values: np.ndarray) -> None:
    """A line at the largest float32, where a network in float32 overflows, if it is in reach."""
    finite = values[np.isfinite(values)]
    if len(finite) and finite.max() > _FLOAT32_LARGEST / 1e6 and not any(t.get_gid() == "overflow" for t in axis.texts):
        axis.axhline(_FLOAT32_LARGEST, color="0.5", linewidth=1, linestyle=":")
        note = axis.annotate(
            "largest float32", (0.99, _FLOAT32_LARGEST), xycoords=("axes fraction", "data"), ha="right", va="bottom",
            color="0.4", size=9,
        )  # fmt: skip
        note.set_gid("overflow")

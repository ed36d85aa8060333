"""What a scheme writes to: the parameters of one layer, or of a stack of layers, wherever a model keeps them.

A weight ``w`` is kept as it is by a plain layer, and as ``w_i = g_i v_i / ||v_i||`` by this package's layers, by both
of torch's weight norms, and, stacked, by the two convolutions of all blocks of a residual stage. Schemes speak of
directions, gains, weights and biases; a ``Unit`` knows where they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm

from wnfused._modules import class_of, norm_dim, shown
from wnfused._spatial import extents
from wnfused.init.roles import Role
from wnfused.linalg import orthogonal_batched
from wnfused.nn import WeightNormalised, WNResidualStage
from wnfused.nn._layer import row_norm, with_directions
from wnfused.nn._rule import check_directions, computed_parameters, fan_ratio, fill_directions_
from wnfused.reference import wide

# Separate layers of one shape are drawn this many at a time, so that a copy of all their weights is never made.
_TOGETHER = 1024


@dataclass(frozen=True, eq=False)
class Unit:
    """One layer, or a stack of layers of one shape with one role.

    Attributes:
        name: of the layer, or an expression that selects the parameters of the stack.
        role: its place in the model.
        module: the layer that computes with these parameters; for a stage's convolutions, the stage.
        v: directions, or the weight itself of a plain layer: ``[*stack, *weight shape]``.
        g: gains; None for a plain layer.
        bias: None for a layer without.
        dim: the dim of the weight that numbers the normalised rows; None for one norm over all of it.
        stacked: whether the first dim of ``v``, ``g`` and ``bias`` numbers layers.
        run: ``input -> output``, where the layer's class computes by a ``forward`` of its own; None elsewhere.
    """

    name: str
    role: Role
    module: nn.Module
    v: Tensor
    g: Tensor | None
    bias: Tensor | None
    dim: int | None = 0
    stacked: bool = False
    run: Callable[[Tensor], Tensor] | None = None

    @property
    def shown(self) -> str:
        """The name as notes have it."""
        return shown(self.name)

    # -------------------------------------------------------------------------------------------------- shape

    @property
    def normalised(self) -> bool:
        return self.g is not None

    @property
    def transposed(self) -> bool:
        return isinstance(self.module, nn.modules.conv._ConvTransposeNd)

    @property
    def groups(self) -> int:
        return getattr(self.module, "groups", 1)

    @property
    def shape(self) -> torch.Size:
        """Of one weight, without the stack's dim."""
        return self.v.shape[1:] if self.stacked else self.v.shape

    @property
    def kernel(self) -> tuple[int, ...]:
        return tuple(self.shape[2:])

    @property
    def channels(self) -> tuple[int, int]:
        """``(c_in, c_out)`` of one group."""
        first, second = self.shape[:2]
        return (first // self.groups, second) if self.transposed else (second, first // self.groups)

    @property
    def fan_in(self) -> float:
        """How many products are summed in one output; on average, where a transposed convolution has a stride."""
        stride = self.option("stride") if self.transposed else ()
        return self.channels[0] * math.prod(self.kernel) / math.prod(stride)

    @property
    def fan_out(self) -> float:
        """How many outputs of a layer of stride 1 one input reaches."""
        return self.channels[1] * math.prod(self.kernel)

    def option(self, name: str) -> tuple[int, ...]:
        """A convolution's ``stride``, say, dim by dim, though it was set anew, to one number for all."""
        return extents(name, getattr(self.module, name), len(self.kernel), None)

    @property
    def fan_ratio(self) -> float:
        """``fan_ratio`` of the layer; the fans of a stage's convolutions are equal."""
        return 1.0 if isinstance(self.module, WNResidualStage) else fan_ratio(self.module, self.shape, self.dim)

    # -------------------------------------------------------------------------------------------------- access

    def weight(self) -> Tensor:
        """The effective weight, float32 or wider."""
        v = self.v.to(wide(self.v.dtype))
        if self.g is None:
            return v
        norm = self._broadcast(self._row_norms(v))
        return v * torch.where(norm == 0, 0.0, self._broadcast(self.g.to(v.dtype)) / norm)

    def mean_gain(self) -> float:
        """Mean gain of a weight-normalised layer, mean row norm of a plain one."""
        gain = self._row_norms(self.v) if self.g is None else self.g
        return gain.detach().double().mean().item() if gain.numel() else 0.0

    def set_weight_(self, weight: Tensor) -> None:
        """``v <- w``, ``g <- ||w||``, row by row; a plain layer's weight ``<- w``.

        A row of zeros keeps its ``v``, as in a layer's ``set_weight``: of zeros torch's own norms make NaN.
        """
        if self.g is None:
            self.v.copy_(weight)
            return
        norm = self._row_norms(weight).reshape(self.g.shape)
        self.v.copy_(with_directions(weight, norm, self.v))
        self.g.copy_(norm)

    def set_gain_(self, gain: float) -> None:
        """All row norms of the effective weight; a plain layer's rows, of its first dim, are scaled to them."""
        if self.g is not None:
            self.g.fill_(gain)
        else:
            norm = self._broadcast(self._row_norms(self.v))
            self.v.copy_(self.v * torch.where(norm == 0, 0.0, gain / norm))

    def scale_(self, factor: float) -> None:
        """The effective weight times ``factor``."""
        (self.v if self.g is None else self.g).mul_(factor)

    def scale_outputs_(self, factor: Tensor) -> None:
        """Each output channel's weights times its entry of ``factor [c_out]``."""
        if self.g is not None and self.dim == 0 and not self.transposed:
            self.g.mul_(factor.reshape(self.g.shape))
            return
        weight = self.weight()
        if self.transposed:
            c_in, c_out = self.channels
            grouped = weight.reshape(self.groups, c_in, c_out, -1) * factor.reshape(self.groups, 1, c_out, 1)
            self.set_weight_(grouped.reshape(weight.shape))
        else:
            self.set_weight_(weight * factor.reshape([-1] + [1] * (weight.dim() - 1)))

    def zero_bias_(self) -> None:
        if self.bias is not None:
            self.bias.zero_()

    def zero_(self) -> None:
        """The layer's output is zero: the gain is where there is one, with ``v`` left to give it a gradient."""
        (self.v if self.g is None else self.g).zero_()
        self.zero_bias_()

    def _row_norms(self, v: Tensor) -> Tensor:
        if self.stacked:
            return row_norm(v.flatten(0, 1), 0)
        return row_norm(v, self.dim)

    def _broadcast(self, rows: Tensor) -> Tensor:
        """One number a row, against ``v``."""
        if self.stacked:
            return rows.reshape(*self.v.shape[:2], *([1] * (self.v.dim() - 2)))
        if self.dim is None:
            return rows.reshape([1] * self.v.dim())
        return rows.reshape([n if d == self.dim % self.v.dim() else 1 for d, n in enumerate(self.v.shape)])

    # ------------------------------------------------------------------------------------------------ compute

    def layers(self) -> Iterator[Unit]:
        """The layers of a stack, one by one, as views."""
        assert self.g is not None
        assert self.bias is not None
        for i in range(len(self.v)):
            name = self.name.replace("[:,", f"[{i},")
            role = replace(self.role, block=self.role.block + i, branch=self.role.branch + i)
            yield Unit(name, role, self.module, self.v[i], self.g[i], self.bias[i])

    def pre_activation(self, x: Tensor) -> Tensor:
        """``op(x, w) + b`` of one layer, without its activation and residual, in the dtype of ``x``.

        Autocast, which keeps copies of weights that change here, has no part in it.
        """
        if self.run is not None:
            return self.run(x)
        with torch.autocast(x.device.type, enabled=False):
            return self._pre_activation(x)

    def _pre_activation(self, x: Tensor) -> Tensor:
        weight = self.weight().to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        module: Any = self.module
        if isinstance(module, nn.Linear):
            return F.linear(x, weight, bias)
        if isinstance(module, WNResidualStage):
            return F.conv2d(x, weight, bias, padding=1)
        if not self.transposed:
            return module._conv_forward(x, weight, bias)
        transposed = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(self.kernel) - 1]
        return transposed(
            x, weight, bias, module.stride, module.padding, module.output_padding, module.groups, module.dilation
        )


def computes_its_own_way(layer: nn.Module) -> bool:
    """Whether a layer's class, or the layer itself, has a ``forward`` that is neither torch's nor this package's."""
    kind: Any = class_of(layer)
    known = next((parent for parent in kind.__mro__ if parent.__module__.startswith(_KNOWN)), kind)
    return "forward" in vars(layer) or kind.forward is not known.forward


_KNOWN = ("torch.nn.", "wnfused.nn.")


Held = tuple[Tensor, Tensor | None, int | None]


def stored_parameters_of(layer: nn.Module) -> Held | None:
    """``parameters_of`` to be written to: None, too, where one of them is computed, as pruning and torch's
    parametrisations do it, and what is written would be lost."""
    held = parameters_of(layer)
    stored = {id(parameter) for parameter in layer.parameters()}
    return held if held is None or all(t is None or id(t) in stored for t in held[:2]) else None


def parameters_of(layer: nn.Module) -> Held | None:
    """``(v, g, dim)`` of a layer, or a stage's stacks; g is None for a plain one. None: something else computes it."""
    if isinstance(layer, WeightNormalised):
        return layer.weight_v, layer.weight_g, layer.dim
    if isinstance(layer, WNResidualStage):
        return layer.weight_v, layer.weight_g, 0
    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm) and hook.name == "weight":
            return layer.weight_v, layer.weight_g, norm_dim(hook.dim)  # type: ignore[return-value]
    if parametrize.is_parametrized(layer):
        chain: Any = layer.parametrizations
        if "weight" in chain:
            if len(chain["weight"]) != 1 or not isinstance(chain["weight"][0], _WeightNorm):
                return None
            return chain["weight"].original1, chain["weight"].original0, norm_dim(chain["weight"][0].dim)
    weight = layer._parameters.get("weight")
    return None if weight is None else (weight, None, 0)


def units_of(role: Role) -> Iterator[Unit]:
    """The layer of a role; of a stage, its transition block's layers and the two stacks of its identity blocks. None
    of those whose tensors something else computes."""
    stage = role.layer
    if not isinstance(stage, WNResidualStage):
        yield from _single(role)
        return
    for part in role.parts():
        if part.layer is not stage:
            yield from _single(part)
        elif len(stage.weight_v) and not computed_parameters(stage):
            i = 1 if part.closes_branch else 0
            yield Unit(
                part.name, part, stage, stage.weight_v[:, i], stage.weight_g[:, i], stage.bias[:, i], stacked=True
            )


def once(units: Sequence[Unit]) -> tuple[list[Unit], list[tuple[Unit, list[Unit]]]]:
    """The units with each weight once, and those whose weight other layers have too, with these.

    It is initialised for the layer whose gamma was stated by hand, else for the first that neither closes a branch nor
    is the head: what some schemes set these to, zero, would silence the others.
    """
    sharing: dict[tuple[int, int], list[Unit]] = {}
    for unit in units:
        sharing.setdefault((id(unit.v), id(unit.g)), []).append(unit)
    chosen = {}
    for key, same in sharing.items():
        by_hand = (unit for unit in same if unit.role.by_hand)
        others = (unit for unit in same if not (unit.role.closes_branch or unit.role.head))
        chosen[key] = next(itertools.chain(by_hand, others, same))
    repeated = [(chosen[key], [u for u in same if u is not chosen[key]]) for key, same in sharing.items()]
    return (
        [unit for unit in units if unit is chosen[id(unit.v), id(unit.g)]],
        [(first, others) for first, others in repeated if others],
    )


def _single(role: Role) -> Iterator[Unit]:
    held = stored_parameters_of(role.layer)
    if held is not None:
        v, g, dim = held
        bias = role.layer._parameters.get("bias")
        yield Unit(role.name, role, role.layer, v, g, bias, dim)


@torch.no_grad()
def fill_orthogonal_(units: Sequence[Unit], *, generator: torch.Generator | None = None) -> None:
    """Haar-distributed ``v``, as ``[rows, rest]``, for every unit; all of one shape at once."""
    shapes: dict[tuple[Any, ...], list[Tensor]] = {}
    for unit in units:
        rows = unit.v if unit.stacked or not unit.dim else unit.v.movedim(unit.dim, 0)
        if unit.stacked:
            fill_directions_(rows, "orthogonal", leading=1, generator=generator)
        elif rows.numel():
            shape = (len(rows), math.prod(rows.shape[1:]))
            shapes.setdefault((shape, rows.dtype, rows.device), []).append(rows)
    for (shape, dtype, device), same in shapes.items():
        for start in range(0, len(same), _TOGETHER):
            some = same[start : start + _TOGETHER]
            drawn = torch.empty(len(some), *shape, dtype=dtype, device=device)
            for rows, matrix in zip(some, orthogonal_batched(drawn, generator=generator), strict=True):
                rows.copy_(matrix.view(rows.shape))


@torch.no_grad()
def fill_gaussian_(units: Sequence[Unit], *, generator: torch.Generator | None = None) -> None:
    """``v ~ N(0, 2 / fan_in)`` for every unit, ``fan_in`` counted over one of its rows."""
    for unit in units:
        fill_directions_(unit.v, "he", leading=int(unit.stacked), dim=unit.dim, generator=generator)


def fill_(units: Sequence[Unit], v: str, *, generator: torch.Generator | None = None) -> None:
    """Directions by name: ``"orthogonal"`` or ``"he"``.

    Raises:
        ValueError: for another name.
    """
    check_directions(v=v)
    (fill_orthogonal_ if v == "orthogonal" else fill_gaussian_)(units, generator=generator)


def draw_(unit: Unit, std: float, distribution: str, *, generator: torch.Generator | None = None) -> None:
    """The weight's entries independent with mean 0 and this standard deviation, ``"normal"`` or ``"uniform"``.

    Raises:
        ValueError: for another distribution.
    """
    if distribution == "normal":
        unit.v.normal_(0.0, std, generator=generator)
    elif distribution == "uniform":
        unit.v.uniform_(-math.sqrt(3) * std, math.sqrt(3) * std, generator=generator)
    else:
        raise ValueError(f"distribution: unknown {distribution!r}; use 'normal' or 'uniform'")
    unit.set_weight_(unit.v)

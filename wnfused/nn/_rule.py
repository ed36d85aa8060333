"""The rule for one layer: directions, gain, zero bias (Arpit, Campos & Bengio 2019, end of sections 3 and 4).

    g = sqrt(gamma * fan_in / fan_out),   fan_in = k k c_in,   fan_out = k k c_out

with gamma = 2 before a ReLU, ``1 / B_k`` for the last convolution of a block in a stage of ``B_k`` blocks, 1
otherwise. Groups divide both fans, so their ratio stays. Only the directions of ``v`` matter to the function.

That is the norm of a filter, a row along dim 0. Rows along another dim are other parts of the same weight, and all of
them together keep its norm, ``g^2 = gamma c_in / rows``.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wnfused._modules import is_sharded
from wnfused._spatial import extents
from wnfused.linalg import orthogonal_batched

if TYPE_CHECKING:
    from wnfused.nn._layer import WeightNormalised
    from wnfused.nn.residual import WNResidualStage

PARAMETERS = ("weight_v", "weight_g", "bias")
"""Of a layer, and of a stage."""

DIRECTIONS = ("orthogonal", "he")
"""How directions are drawn: Haar over ``[rows, fan_in]``, or each entry from ``N(0, 2 / fan_in)``."""


def check_directions(**argument: object) -> None:
    """Raises ValueError unless the named argument is one of ``DIRECTIONS``."""
    [(name, kind)] = argument.items()
    if kind not in DIRECTIONS:
        raise ValueError(f"{name}: unknown {kind!r}; use 'orthogonal' or 'he'")


def fan_ratio(layer: nn.Module, shape: torch.Size, dim: int | None) -> float:
    """``fan_in / fan_out``, in which the kernel's area and the groups cancel; times the filters for each row where the
    weight, of this shape, is normalised along another ``dim`` than 0.

    A transposed convolution is normalised over its input channels, so the rule does not apply: ``prod(stride)`` keeps
    the mean square per output element where ``c_in = c_out``.
    """
    rows = 1 if dim is None else shape[dim]
    return _filter_ratio(layer, len(shape) - 2) * (shape[0] / rows if dim != 0 else 1.0)


def _filter_ratio(layer: nn.Module, spatial: int) -> float:
    if isinstance(layer, nn.Linear):
        return layer.in_features / layer.out_features
    assert isinstance(layer, nn.modules.conv._ConvNd)
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        return math.prod(extents("stride", layer.stride, spatial, 1))  # which may have been set anew, to one number
    return layer.in_channels / layer.out_channels


def activation_gamma(activation: str | None, negative_slope: float) -> float:
    """``1 / E[act'^2]`` for a symmetric input: 2 before a ReLU, ``2 / (1 + slope^2)`` before a leaky one, else 1."""
    if activation == "relu":
        return 2.0
    if activation == "leaky_relu":
        return 2.0 / (1.0 + negative_slope**2)
    return 1.0


def default_gamma(layer: WeightNormalised) -> float:
    """The layer's stated gamma, or the one its fused activation asks for."""
    if layer.gamma is not None:
        return layer.gamma
    return activation_gamma(layer.activation, layer.negative_slope)


@torch.no_grad()
def fill_directions_(
    v: Tensor, kind: str, *, leading: int = 0, dim: int | None = 0, generator: torch.Generator | None = None
) -> Tensor:
    """Fills ``v`` in place: ``"orthogonal"`` (Haar over ``[rows, fan_in]``) or ``"he"`` (``N(0, 2 / fan_in)``).

    Args:
        v: ``[*leading dims, rows, *rest]``, ``rows`` numbered by ``dim`` (of the dims after the leading ones). If it is
            sharded, every process draws the whole, and gets its part of what the first one drew.
        leading: how many dims number independent layers.
    """
    if v.numel() == 0:
        return v
    if is_sharded(v):
        return _fill_shards_(v, kind, leading, dim, generator)
    rows_first = v if dim in (0, None) else v.movedim(dim + leading if dim >= 0 else dim, leading)
    if kind == "orthogonal":
        matrices = rows_first.reshape(*rows_first.shape[: leading + 1], -1)
        orthogonal_batched(matrices, generator=generator)
        if not matrices._is_view():  # none of v has that shape
            rows_first.copy_(matrices.view(rows_first.shape))
    else:
        assert kind == "he", kind
        fan_in = math.prod(rows_first.shape[leading + 1 :])
        v.normal_(0.0, math.sqrt(2.0 / max(fan_in, 1)), generator=generator)
    return v


def _write_(parameter: Any, whole: Tensor) -> Tensor:
    """``parameter <- whole``; of a sharded one each process gets its part of what the first process has."""
    if is_sharded(parameter):
        from torch.distributed.tensor import distribute_tensor

        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    written: Tensor = parameter.copy_(whole)
    return written


def _fill_shards_(v: Any, kind: str, leading: int, dim: int | None, generator: torch.Generator | None) -> Tensor:
    whole = torch.empty(v.shape, dtype=v.dtype, device=v.to_local().device)
    fill_directions_(whole, kind, leading=leading, dim=dim, generator=generator)
    return _write_(v, whole)


def computed_parameters(layer: nn.Module) -> list[str]:
    """Those of a layer's or a stage's parameters that something else computes, as pruning and parametrisations do."""
    return [name for name in PARAMETERS if name not in layer._parameters]


def check_stored(*layers: nn.Module) -> None:
    """Raises RuntimeError where a parameter is computed, so that what is written to it would be lost."""
    for name in itertools.chain.from_iterable(map(computed_parameters, layers)):
        raise RuntimeError(
            f"{name}: cannot be reset, something else computes it (pruning, a parametrisation); remove that first"
        )


@torch.no_grad()
def reset_layer(
    layer: WeightNormalised,
    gamma: float | None = None,
    kind: str | None = None,
    generator: torch.Generator | None = None,
) -> float:
    """``wnfused.init.reset_layer_`` of arguments that are known to fit."""
    fill_directions_(layer.weight_v, kind or layer.init, dim=layer.dim, generator=generator)
    gain = math.sqrt(
        (default_gamma(layer) if gamma is None else gamma) * fan_ratio(layer, layer.weight_v.shape, layer.dim)
    )
    layer.weight_g.fill_(gain)
    bias = layer._parameters["bias"]
    if bias is not None:
        bias.zero_()
    return gain


@torch.no_grad()
def reset_stage(
    stage: WNResidualStage,
    gammas: tuple[float, float] | None = None,
    kind: str | None = None,
    generator: torch.Generator | None = None,
) -> tuple[float, float]:
    """``wnfused.init.reset_stage_`` of arguments that are known to fit."""
    fill_directions_(stage.weight_v, kind or stage.init, leading=2, generator=generator)
    first, last = (2.0, 1.0 / stage.num_blocks) if gammas is None else gammas
    gains = math.sqrt(first), math.sqrt(last)
    g = stage.weight_g
    _write_(g, torch.tensor(gains, dtype=g.dtype, device=g.device)[:, None].expand(g.shape).contiguous())
    stage.bias.zero_()
    return gains

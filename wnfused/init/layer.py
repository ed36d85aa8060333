"""One layer, or all blocks of a stage, anew: the rule of ``wnfused.nn``'s layers (``nn/_rule.py``), and torch's own."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from wnfused._numbers import draws_on, factors, random_source
from wnfused.nn import WeightNormalised, WNResidualStage
from wnfused.nn._layer import refuse_frozen
from wnfused.nn._rule import check_directions, check_stored, reset_layer, reset_stage


def _check_source(kind: str | None, generator: torch.Generator | None, v: Tensor) -> None:
    if kind is not None:
        check_directions(kind=kind)
    random_source(generator=generator)
    draws_on(v.device, generator=generator)


def reset_layer_(
    layer: WeightNormalised,
    *,
    gamma: float | None = None,
    kind: str | None = None,
    generator: torch.Generator | None = None,
) -> float:
    """Directions, ``g = sqrt(gamma fan_in / fan_out)``, zero bias, for one weight-normalised layer.

    Args:
        gamma: at least 0; the layer's own, or that of its activation, if None.
        kind: ``"orthogonal"`` or ``"he"``; the layer's ``init`` if None.
        generator: source of the directions, on their device; torch's own if None.

    Returns:
        The gain it set.

    Raises:
        TypeError, ValueError: naming the argument that does not fit.
        RuntimeError: inside ``wnfused.frozen``; or something else computes a parameter (pruning, a parametrisation).
    """
    if not isinstance(layer, WeightNormalised):
        raise TypeError(f"layer: expected a weight-normalised layer, got {type(layer).__name__}")
    if gamma is not None:
        factors(gamma=gamma)
    if is_lazy(layer.weight_v):
        raise ValueError("layer: has no shape yet; run it once")
    check_stored(layer)
    refuse_frozen(layer=layer)
    _check_source(kind, generator, layer.weight_v)
    return reset_layer(layer, gamma, kind, generator)


def reset_stage_(
    stage: WNResidualStage,
    *,
    gammas: tuple[float, float] | None = None,
    kind: str | None = None,
    generator: torch.Generator | None = None,
) -> tuple[float, float]:
    """Directions, ``g = sqrt(gamma)``, zero bias, for all identity blocks of a stage at once, whose fans are equal.

    Args:
        gammas: two numbers, each at least 0, of the convolution before the ReLU and of the one that closes the block;
            ``(2, 1 / B_k)`` if None, with ``B_k`` the blocks of the whole stage.
        kind: ``"orthogonal"`` or ``"he"``; the stage's ``init`` if None.
        generator: source of the directions, on their device; torch's own if None.

    Returns:
        The gains it set, of the convolution before the ReLU and of the one that closes the block.

    Raises:
        TypeError, ValueError: naming the argument that does not fit.
        RuntimeError: something else computes a parameter (pruning, a parametrisation), or ``wnfused.frozen`` holds the
            stage's transition.
    """
    if not isinstance(stage, WNResidualStage):
        raise TypeError(f"stage: expected a WNResidualStage, got {type(stage).__name__}")
    if gammas is not None:
        if not isinstance(gammas, (tuple, list)) or len(gammas) != 2:
            raise ValueError(f"gammas: {gammas!r} must be two numbers")
        factors(**{f"gammas[{i}]": gamma for i, gamma in enumerate(gammas)})
    check_stored(stage)
    refuse_frozen(stage=stage)
    _check_source(kind, generator, stage.weight_v)
    return reset_stage(stage, gammas, kind, generator)


@torch.no_grad()
def reset_plain_(layer: nn.Module, generator: torch.Generator | None = None) -> None:
    """torch's own default for a plain linear or convolutional layer, drawn from ``generator``."""
    assert isinstance(layer.weight, Tensor)
    nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5), generator=generator)
    if isinstance(layer.bias, Tensor):
        bound = 1 / math.sqrt(max(layer.weight[0].numel(), 1))
        layer.bias.uniform_(-bound, bound, generator=generator)

"""Which parameters of a model an optimiser decays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm

from wnfused._modules import check_module
from wnfused._numbers import at_least_0
from wnfused.nn._layer import refuse_shapeless


def param_groups(model: nn.Module, weight_decay: float, **options: Any) -> list[dict[str, Any]]:
    """Two groups for an optimiser: weights with ``weight_decay``; gains, biases and vectors without.

    Decayed are ``weight_v`` and every other parameter of two or more dims. Not decayed are ``weight_g`` and the gains
    of torch's weight norms, of whatever tensor; whatever is named ``bias``; a stage's stacked gains and biases; and
    parameters of fewer than two dims, such as those of batch norm. Decaying ``v`` does not shrink the weight
    ``g v / ||v||``; it keeps ``||v||``, by which the step of the direction is divided, from growing.

    The papers that this package follows decay every parameter: to reproduce them use ``model.parameters()``.

    Args:
        model: its parameters that require a gradient are taken, each once.
        weight_decay: of the first group, >= 0.
        **options: further entries of both groups, such as ``lr``.

    Returns:
        ``[{"params": ..., "weight_decay": weight_decay}, {"params": ..., "weight_decay": 0.0}]``, each in the model's
        order.

    Raises:
        TypeError: ``model`` is not a module, or ``params`` is among the options.
        ValueError: ``weight_decay`` is negative or not finite; a lazy layer has no shape yet.
    """
    check_module(model=model)
    at_least_0(weight_decay=weight_decay)
    if "params" in options:
        raise TypeError("params: is no option; the parameters are those of the model")
    refuse_shapeless(model)
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    gains = {id(gain) for module in model.modules() for gain in _gains_of_torchs(module)}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        exempt = name.rpartition(".")[2] in ("bias", "weight_g") or id(parameter) in gains
        (kept if exempt or parameter.dim() < 2 else decayed).append(parameter)
    return [
        {**options, "params": decayed, "weight_decay": float(weight_decay)},
        {**options, "params": kept, "weight_decay": 0.0},
    ]


def _gains_of_torchs(module: nn.Module) -> Iterator[nn.Parameter | None]:
    """The gains of torch's weight norms on a module, by either of its interfaces."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            yield module._parameters.get(f"{hook.name}_g")
    if parametrize.is_parametrized(module):
        for chain in cast(nn.ModuleDict, module.parametrizations).values():
            if isinstance(cast(nn.ModuleList, chain)[0], _WeightNorm):  # the only place that it can have
                yield chain._parameters.get("original0")

"""Which parameters of a model an optimiser decays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm

from wnfused._modules import check_module
from wnfused._numbers import at_least_0
from wnfused.nn._layer import refuse_shapeless


def param_groups(model: nn.Module, weight_decay: float, **options: Any) -> list[dict[str, Any]]:
    """Two groups for an optimiser: weights with ``weight_decay``; gains, biases and vectors without.

    Decayed are ``weight_v`` and every other parameter of two or more dims. Not decayed are ``weight_g`` and the gains
    of torch's weight norms, of whatever tensor; whatever is named ``bias``; a stage's stacked gains and biases; the
    parameters of torch's normalisations (batch, layer, group, instance, RMS), of however many dims; and parameters of
    fewer than two dims. Where a tensor is pruned or parametrised, what it is computed from counts as it would. Decaying
    ``v`` does not shrink the weight ``g v / ||v||``; it keeps ``||v||``, by which the step of the direction is divided,
    from growing.

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
    exempt = {id(parameter) for module in model.modules() for parameter in _undecayed(module)}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        stays = _tensor_of(name) in ("bias", "weight_g") or id(parameter) in exempt
        (kept if stays or parameter.dim() < 2 else decayed).append(parameter)
    return [
        {**options, "params": decayed, "weight_decay": float(weight_decay)},
        {**options, "params": kept, "weight_decay": 0.0},
    ]


_NORMALISATIONS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_PRUNED = "_orig"  # what pruning calls the parameter behind a tensor


def _tensor_of(name: str) -> str:
    """The tensor, without its module, that a parameter is or that is computed from it by pruning or parametrisations:
    ``weight_g`` of ``weight_g_orig`` and of ``parametrizations.weight_g.original``."""
    *path, last = name.removesuffix(_PRUNED).split(".")
    return path[-1] if path[-2:-1] == ["parametrizations"] and last.startswith("original") else last


def _undecayed(module: nn.Module) -> Iterator[nn.Parameter | None]:
    """A normalisation's parameters; the gains of torch's weight norms on a module, by either of its interfaces."""
    if isinstance(module, _NORMALISATIONS):
        yield from module.parameters()
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            yield _stored(module, f"{hook.name}_g")
    if parametrize.is_parametrized(module):
        for chain in cast(nn.ModuleDict, module.parametrizations).values():
            if isinstance(cast(nn.ModuleList, chain)[0], _WeightNorm):  # the only place that it can have
                yield _stored(chain, "original0")


def _stored(module: nn.Module, name: str) -> nn.Parameter | None:
    """A parameter, pruned or not."""
    return module._parameters.get(name, module._parameters.get(name + _PRUNED))

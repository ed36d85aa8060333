"""State dicts in the forms that torch knows, and back: renamed, split and stacked, never rounded.

Layers and stages load all of these forms themselves, with ``strict=True``. What is here is for the way out, and for
state dicts without a model at hand. ``wnfused.nn._keys`` has the table of names.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import is_parametrized

from wnfused import functional
from wnfused._modules import check_module, is_sharded, sharded_error
from wnfused.nn import WeightNormalised, WNResidualStage
from wnfused.nn._keys import ORIGINALS, tensor_at, unstack_blocks

APIS = ("old", "new", "plain")


@torch.no_grad()
def state_dict_to_torch(
    source: nn.Module | Mapping[str, Any], api: str = "new", *, like: nn.Module | Mapping[str, Any] | None = None
) -> OrderedDict[str, Any]:
    """The state dict of a model under the names of torch's layers.

    The blocks of a ``wnfused.WNResidualStage`` come out one by one, named as ``stage.unstack()`` names them:
    ``0.conv1``, ``0.conv2``, ``0.shortcut`` for the transition block, then ``1.conv1``, ...

    Args:
        source: a model, or its state dict; one of torch's own weight-normalised models too.
        api: ``"old"`` for ``torch.nn.utils.weight_norm``, ``"new"`` for
            ``torch.nn.utils.parametrizations.weight_norm``, ``"plain"`` for layers without weight norm, whose
            ``weight`` is what ``layer.weight`` reads and ``wnfused.fold`` leaves. torch's parametrised layers load
            ``"old"``, too: it is the form for a model that mixes the two.
        like: a model of torch's layers, or its state dict, that is to load the result: each layer comes in the form
            that it has there, and ``api`` is for those that it has not. It is the way back for a model that mixes
            plain and weight-normalised layers (``convert(..., plain=True)``).

    Returns:
        A new ordered dict, with views of the source's tensors, bit for bit; plain weights are computed. Entries that
        belong to no weight-normalised layer stay as they are.

    Raises:
        TypeError: ``source`` or ``like`` is neither a module nor a mapping, or a weight's entry no tensor.
        ValueError: ``api`` is none of the three, a lazy layer has no shape yet, or a plain weight is to be computed of
            one that is sharded.
    """
    if api not in APIS:
        raise ValueError(f"api: unknown {api!r}; use 'old', 'new' or 'plain'")
    if not isinstance(source, (nn.Module, Mapping)):
        raise TypeError(f"source: expected an nn.Module or a state dict, got {type(source).__name__}")
    if not isinstance(like, (nn.Module, Mapping, type(None))):
        raise TypeError(f"like: expected an nn.Module or a state dict, got {type(like).__name__}")
    state = _copy(source.state_dict() if isinstance(source, nn.Module) else source)
    for name, entry in state.items():
        if is_lazy(entry):
            raise ValueError(f"source: {name!r} has no shape yet; run the model once")
    modules = dict(source.named_modules(remove_duplicate=False)) if isinstance(source, nn.Module) else {}
    chained = _with_second_step(state)
    normalised = [
        prefix
        for prefix in _prefixes(state, *ORIGINALS.values())
        if _is_weight_norm(modules.get(prefix.removesuffix(".")), prefix in chained)
    ]
    for name in (f"{p}{name}" for p in normalised for name in ORIGINALS.values()):
        tensor_at(state, name)
    for name in (f"{p}{name}" for p in _prefixes(state, *ORIGINALS) for name in ORIGINALS):
        tensor_at(state, name)
    _rename(state, normalised, {new: old for old, new in ORIGINALS.items()})
    stages = [p for p in _prefixes(state, *ORIGINALS) if state[f"{p}weight_v"].dim() == 6 and f"{p}bias" in state]
    for prefix in stages:
        unstack_blocks(state, prefix)
    wanted = (like.state_dict() if isinstance(like, nn.Module) else like) or {}
    layers: dict[str, list[str]] = {form: [] for form in APIS}
    for prefix in _prefixes(state, *ORIGINALS):
        layers[_form(prefix, wanted) or api].append(prefix)
    for prefix in layers["plain"]:
        v, g = state[f"{prefix}weight_v"], state.pop(f"{prefix}weight_g")
        if is_sharded(v):
            remedy = (
                "give the full state dict, of torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
                "options=StateDictOptions(full_state_dict=True)), or ask for api='old' or 'new'"
            )
            raise sharded_error(f"source: '{prefix}weight_v'", remedy)
        state[f"{prefix}weight_v"] = functional.weight_norm(v, g, _dim(v, g))
    _rename(state, layers["plain"], {"weight_v": "weight"})
    _rename(state, layers["new"], ORIGINALS)
    return state


@torch.no_grad()
def state_dict_from_torch(state_dict: Mapping[str, Any], model: nn.Module) -> OrderedDict[str, Any]:
    """A state dict in any of torch's forms, under the names of ``model``: what ``model.load_state_dict`` makes of it.

    Args:
        state_dict: plain, old or new, layer by layer; the blocks of a stage one by one, or stacked already.
        model: says which weights are normalised, along which dim, and which blocks are stacked. It is not changed.

    Returns:
        A new ordered dict; tensors are shared where they need not be stacked.

    Raises:
        TypeError: ``state_dict`` is not a mapping, a weight's entry no tensor, or ``model`` not a module.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict: expected a mapping, got {type(state_dict).__name__}")
    check_module(model=model)
    found = _copy(state_dict)
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (WeightNormalised, WNResidualStage)):
            module.adopt_keys(found, f"{name}." if name else "")
    return found


def _copy(state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """The entries, and the versions of the modules that wrote them, which torch keeps beside."""
    copy = OrderedDict(state)
    if hasattr(state, "_metadata"):
        copy._metadata = state._metadata  # type: ignore[attr-defined]
    return copy


def _prefixes(state: Mapping[str, Any], gain: str, direction: str) -> list[str]:
    """The layers that have entries of these two names."""
    prefixes = [name.removesuffix(gain) for name in state if name == gain or name.endswith(f".{gain}")]
    return [prefix for prefix in prefixes if f"{prefix}{direction}" in state]


def _is_weight_norm(module: nn.Module | None, chained: bool) -> bool:
    """Whether a parametrised weight with two originals is torch's weight norm, and nothing more.

    Args:
        module: the layer, where it is known.
        chained: whether the state dict shows a second step.
    """
    if module is not None and is_parametrized(module, "weight"):
        steps = cast(nn.ModuleDict, module.parametrizations)["weight"]
        return [type(step) for step in cast(nn.ModuleList, steps)] == [_WeightNorm]
    return not chained


def _with_second_step(state: Mapping[str, Any]) -> set[str]:
    """The layers whose weight has a parametrisation with entries of its own, beside the originals."""
    return {found[1] for found in map(_STEP.fullmatch, state) if found}


_STEP = re.compile(r"((?:.*\.)?)parametrizations\.weight\.\d.*", re.DOTALL)


def _form(prefix: str, state: Mapping[str, Any]) -> str | None:
    """The form in which a state dict has a layer."""
    names = {"new": ORIGINALS["weight_v"], "old": "weight_v", "plain": "weight"}
    return next((form for form, name in names.items() if f"{prefix}{name}" in state), None)


def _rename(state: OrderedDict[str, Any], layers: list[str], names: Mapping[str, str]) -> None:
    """New names for the entries of these layers, in the order they had: optimisers number parameters by it."""
    new = {f"{layer}{old}": f"{layer}{name}" for layer in layers for old, name in names.items()}
    items = [(new.get(name, name), value) for name, value in state.items()]
    state.clear()
    state.update(items)


def _dim(v: Tensor, g: Tensor) -> int | None:
    """The dim that numbers the rows, read off the shape of the gain; a single row is the whole tensor by any name."""
    if g.dim() != v.dim():
        return None
    rows = [d for d, n in enumerate(g.shape) if n != 1]
    single = [d for d, n in enumerate(v.shape) if n == 1]
    return next(iter(rows or single), None)

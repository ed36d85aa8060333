"""The names under which a weight-normalised weight is stored, in a state dict of any of torch's forms.

================  ==========================================================================================
form              entries of one layer
================  ==========================================================================================
old, and ours     ``weight_g``, ``weight_v``                        (``torch.nn.utils.weight_norm``)
new               ``parametrizations.weight.original0``, ``...1``   (``torch.nn.utils.parametrizations``)
plain             ``weight``                                        (no weight norm: ``v = w, g = ||w||``)
================  ==========================================================================================

A stage stacks its identity blocks under ``weight_v, weight_g, bias``; torch's forms number the blocks, ``0`` being the
transition block if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

State = MutableMapping[str, Any]
Split = Callable[[Tensor], tuple[Tensor, Tensor]]

ORIGINALS = {"weight_g": "parametrizations.weight.original0", "weight_v": "parametrizations.weight.original1"}
STACKED = ("weight_v", "weight_g", "bias")
CONVOLUTIONS = ("conv1", "conv2")


def tensor_at(state: Mapping[str, Any], name: str) -> Tensor:
    """An entry that must be a tensor."""
    entry = state[name]
    if not isinstance(entry, Tensor):
        raise TypeError(f"state_dict: {name!r} must be a tensor, got {type(entry).__name__}")
    return entry


def to_old(state: State, prefix: str, split: Split) -> None:
    """Brings the entries of one layer into the old form, in place; those of another form go.

    Args:
        split: ``split(w)`` gives ``weight_g`` and ``weight_v`` of a plain weight.

    Raises:
        TypeError: the plain weight is no tensor.
    """
    g, v = (f"{prefix}{name}" for name in ORIGINALS)
    g_new, v_new = (f"{prefix}{name}" for name in ORIGINALS.values())
    if g_new in state and v_new in state:
        state[g], state[v] = state.pop(g_new), state.pop(v_new)
    elif f"{prefix}weight" in state and not (g in state or v in state):
        state[g], state[v] = split(tensor_at(state, f"{prefix}weight"))
        del state[f"{prefix}weight"]


def stack_blocks(state: State, prefix: str, stacked: Sequence[Tensor], transition: bool, split: Split) -> None:
    """Brings a stage's blocks, one by one in any form, into the stacked form, in place; incomplete ones stay.

    Args:
        stacked: the stage's own ``weight_v, weight_g, bias``, for their shapes.
        transition: whether block 0 is the transition block.
    """
    if f"{prefix}weight_v" in state:
        return
    layers = [f"{prefix}{i + transition}.{conv}." for i in range(len(stacked[0])) for conv in CONVOLUTIONS]
    for layer in layers:
        to_old(state, layer, split)
    if all(f"{layer}{name}" in state for layer in layers for name in STACKED):
        for name, like in zip(STACKED, stacked, strict=True):
            entries = [_as_stacked(tensor_at(state, f"{layer}{name}"), like) for layer in layers]
            for layer in layers:
                del state[f"{layer}{name}"]
            state[f"{prefix}{name}"] = _stack(entries, like)
    if transition:
        for name in [name for name in state if name.startswith(f"{prefix}0.")]:
            state[f"{prefix}transition.{name.removeprefix(f'{prefix}0.')}"] = state.pop(name)


def _as_stacked(entry: Tensor, like: Tensor) -> Tensor:
    """One convolution's entry in the shape that it has in the stack; where it has another size, in its own."""
    if entry.numel() == like.shape[2:].numel():
        return entry.reshape(like.shape[2:])
    return entry.flatten() if like.dim() == 3 else entry


def _stack(entries: Sequence[Tensor], like: Tensor) -> Tensor:
    """``[B', 2, ...]`` of 2 B' entries; where some fit and some do not, the shape is a misfit's, for torch's error."""
    if not entries:
        return like
    shape = next((e.shape for e in entries if e.shape != like.shape[2:]), like.shape[2:])
    if any(e.shape != shape for e in entries):
        return entries[0].new_empty(1).expand(*like.shape[:2], *shape)
    return torch.stack(list(entries)).reshape(*like.shape[:2], *shape)


def count_blocks(state: State, prefix: str) -> int:
    """How many blocks, one by one, a state dict has for the stage of this prefix, up to the first that is missing."""
    names = {name.removeprefix(prefix).partition(".")[0] for name in state if name.startswith(prefix)}
    return next(i for i in range(len(names) + 1) if str(i) not in names)


def unstack_blocks(state: State, prefix: str) -> None:
    """The inverse of ``stack_blocks``, in the old form: views of the stacked tensors under each block's name."""
    transition = [name for name in state if name.startswith(f"{prefix}transition.")]
    for name in transition:
        state[f"{prefix}0.{name.removeprefix(f'{prefix}transition.')}"] = state.pop(name)
    v, g, bias = (state.pop(f"{prefix}{name}") for name in STACKED)
    for i in range(len(v)):
        for j, conv in enumerate(CONVOLUTIONS):
            layer = f"{prefix}{i + bool(transition)}.{conv}."
            state[f"{layer}bias"] = bias[i, j]
            state[f"{layer}weight_g"] = g[i, j].reshape(-1, 1, 1, 1)
            state[f"{layer}weight_v"] = v[i, j]

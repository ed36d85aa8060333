"""The same parameters for every peer, whatever form it keeps them in.

``layers(module)`` lists a module's layers in the order of its forward pass, be they plain, under torch's weight norm
or stacked in one of our stages; ``fill`` writes into them what ``draw`` gives for a layer's number, so that all peers
of a workload compute one function without a second model in memory.

The rows of ``v`` get norms that differ from 1 and every bias differs from 0: a peer that forgot the norm or the bias
must not pass for right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from wnfused.nn import WeightNormalised, WNResidualStage


@dataclass(frozen=True)
class Entry:
    """A parameter, or the part of a stacked one that belongs to one layer."""

    parameter: nn.Parameter
    index: tuple[int, ...] = ()

    def of(self, tensor: Tensor) -> Tensor:
        """This entry's part of a tensor that has the parameter's shape, such as its gradient."""
        return tensor[self.index]


@dataclass(frozen=True)
class Layer:
    """``entries`` has ``v``, ``g``, ``b`` where the layer is weight-normalised, ``w`` and ``b`` where it is not."""

    name: str
    entries: dict[str, Entry]


def layers(module: nn.Module, name: str = "") -> Iterator[Layer]:
    """The layers of a module in the order of its forward pass."""
    if isinstance(module, WNResidualStage):
        if module.transition is not None:
            yield from layers(module.transition, f"{name}.transition")
        stacks = {"v": module.weight_v, "g": module.weight_g, "b": module.bias}
        for block in range(module.weight_v.shape[0]):
            for i in (0, 1):
                entries = {key: Entry(stack, (block, i)) for key, stack in stacks.items()}
                yield Layer(f"{name}.{block}.conv{i + 1}", entries)
    elif isinstance(module, WeightNormalised):
        yield _layer(name, v=module.weight_v, g=module.weight_g, b=module.bias)
    elif isinstance(module, (nn.Linear, _ConvNd)):
        if parametrize.is_parametrized(module, "weight"):
            weight = module.parametrizations.weight
            yield _layer(name, v=weight.original1, g=weight.original0, b=module.bias)
        else:
            yield _layer(name, w=module.weight, b=module.bias)
    else:
        for child_name, child in module.named_children():
            yield from layers(child, f"{name}.{child_name}" if name else child_name)


def _layer(name: str, **parameters: Any) -> Layer:
    return Layer(name, {key: Entry(parameter) for key, parameter in parameters.items()})


def draw(number: int, name: str, shape: torch.Size, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """``(v, g, b)`` in float32 of layer ``number``: the gains of Arpit, Campos & Bengio 2019, jittered by a tenth.

    The factor of the gain is 2 before a ReLU, ``1 / blocks`` for a block's last convolution, 1 for stem, shortcuts
    and head.
    """
    generator = torch.Generator().manual_seed(number)
    role = name.rpartition(".")[2]
    gamma = 1 / blocks if role == "conv2" else 1.0 if role in ("stem", "shortcut", "head") else 2.0
    rows = [-1] + [1] * (len(shape) - 1)
    v = torch.randn(shape, generator=generator)
    v *= torch.randn(shape[0], generator=generator).mul(0.3).exp().reshape(rows)
    g = torch.randn(shape[0], generator=generator).mul(0.1).exp() * math.sqrt(gamma * shape[1] / shape[0])
    b = torch.randn(shape[0], generator=generator) * 0.05 * math.sqrt(gamma)
    return v, g, b


def effective_weight(v: Tensor, g: Tensor) -> Tensor:
    """``w_i = g_i v_i / ||v_i||``, the composite that autograd differentiates."""
    scale = g / v.flatten(1).norm(dim=1)
    return v * scale.reshape([-1] + [1] * (v.dim() - 1))


@torch.no_grad()
def fill(module: nn.Module, blocks: int) -> nn.Module:
    """Writes every layer's parameters; ``blocks`` a stage. Returns the module."""
    for number, layer in enumerate(layers(module)):
        entries = layer.entries
        weight = entries.get("v") or entries["w"]
        v, g, b = draw(number, layer.name, weight.of(weight.parameter).shape, blocks)
        values = {"v": v, "g": g, "b": b}
        if "w" in entries:
            values["w"] = effective_weight(v.double(), g.double())
        for key, entry in entries.items():
            target = entry.of(entry.parameter)
            # A transposed layer's rows are its inputs, of which it has as many as outputs or more.
            target.copy_(values[key].flatten()[: target.numel()].reshape(target.shape))
    return module

"""A workload's module in three forms: plain torch, torch's weight norm on it, and ours."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrizations

import wnfused
from bench.users import NETWORKS, PASSES
from bench.workloads import Converted, ConvLayer, LinearLayer, Network, Stage, WindowLayer, Workload
from wnfused.nn import PlainResidualBlock


def plain(workload: Workload) -> nn.Module:
    """Without any weight norm."""
    match workload:
        case LinearLayer(features=n):
            return nn.Sequential(nn.Linear(n, n), nn.ReLU())
        case ConvLayer(channels=n, kernel=k):
            return nn.Sequential(nn.Conv2d(n, n, k, padding=k // 2), nn.ReLU())
        case WindowLayer():
            return nn.Sequential(_window(workload, plain=True), nn.ReLU())
        case Stage(channels=n, blocks=blocks):
            return nn.Sequential(*(PlainResidualBlock(n, n) for _ in range(blocks)))
        case Converted(network=network):
            return NETWORKS[network]()
        case Network(depth=depth, width=width, in_channels=channels):
            return wnfused.models.wrn(depth, width=width, in_channels=channels, norm="none")
    raise TypeError(f"workload: {type(workload).__name__} has no module")


def eager(workload: Workload) -> nn.Module:
    """Under ``torch.nn.utils.parametrizations.weight_norm``, the head of a network left plain as ours is."""
    module = plain(workload)
    for name, layer in list(module.named_modules()):
        if isinstance(layer, (nn.Linear, _ConvNd)) and name != "head":
            parametrizations.weight_norm(layer)
    return module


def ours(workload: Workload) -> nn.Module:
    """This package's."""
    match workload:
        case LinearLayer(features=n):
            return wnfused.WNLinear(n, n, activation="relu")
        case ConvLayer(channels=n, kernel=k):
            return wnfused.WNConv2d(n, n, k, padding=k // 2, activation="relu")
        case WindowLayer():
            return _window(workload, plain=False)
        case Stage(channels=n, blocks=blocks):
            return wnfused.WNResidualStage(n, n, blocks)
        case Converted():
            return wnfused.convert(eager(workload))
        case Network(depth=depth, width=width, in_channels=channels):
            return wnfused.models.wrn(depth, width=width, in_channels=channels)
    raise TypeError(f"workload: {type(workload).__name__} has no module")


FORMS = {"plain": plain, "eager": eager, "ours": ours}


def unwritten(form: Callable[[Workload], nn.Module], workload: Workload) -> nn.Module:
    """A form of a workload whose parameters are all to be written: drawing those of 10,000 layers takes a minute."""
    if not isinstance(workload, Network):  # others have buffers, or are made in a moment
        return form(workload)
    with torch.device("meta"):
        module = form(workload)
    return module.to_empty(device="cpu")


def _window(workload: WindowLayer, plain: bool) -> nn.Module:
    source, prefix = (nn, "Conv") if plain else (wnfused, "WNConv")
    kind = getattr(source, f"{prefix}{'Transpose' * workload.transposed}{len(workload.size)}d")
    reach = workload.dilation * (workload.kernel - 1)
    padding = (reach + 1 - workload.stride) // 2 if workload.transposed else reach // 2
    options = {"stride": workload.stride, "padding": padding, "dilation": workload.dilation, "groups": workload.groups}
    options |= {} if plain else {"activation": "relu"}
    return kind(workload.channels, workload.outputs, workload.kernel, **options)


def blocks(workload: Workload) -> int:
    """Residual blocks that follow one another at one size; 1 where there are none."""
    match workload:
        case Stage(blocks=count):
            return count
        case Network(depth=depth):
            return (depth - 4) // 6
        case Converted():
            return 3
    return 1


def input_shape(workload: Workload) -> tuple[int, ...]:
    match workload:
        case LinearLayer(features=n, batch=batch):
            return batch, n
        case WindowLayer(channels=n, size=size, batch=batch):
            return batch, n, *size
        case ConvLayer(channels=n, size=size, batch=batch) | Stage(channels=n, size=size, batch=batch):
            return batch, n, size, size
        case Network(in_channels=n, size=size, batch=batch):
            return batch, n, size, size
        case Converted(size=size, batch=batch):
            return batch, *size
    raise TypeError(f"workload: {type(workload).__name__} has no input")


def output_shape(workload: Workload) -> tuple[int, ...]:
    shape = input_shape(workload)
    match workload:
        case Network():
            return shape[0], 10
        case Converted():
            with torch.device("meta"):
                return tuple(plain(workload)(torch.empty(shape)).shape)
        case WindowLayer(outputs=n, size=size, stride=stride, transposed=transposed):
            return shape[0], n, *(s * stride if transposed else s // stride for s in size)
    return shape


def input_needs_gradient(workload: Workload) -> bool:
    """A layer or stage passes its input's gradient on; a whole network begins at the data."""
    return not isinstance(workload, (Network, Converted))


@functools.cache
def rows(workload: Workload) -> tuple[int, ...]:
    """Entries of a row of each layer's weight, in the order of the modules."""
    with torch.device("meta"):
        module = plain(workload)
    return tuple(layer.weight[0].numel() for layer in module.modules() if isinstance(layer, (nn.Linear, _ConvNd)))


@functools.cache
def flops(workload: Workload) -> tuple[int, int]:
    """``(forward, forward + backward)``, counted as direct products: two a multiply-add, norms and sums left out.

    The backward takes two products of the forward's size a layer, for ``dx`` and ``dw``; the first layer of a network
    has no ``dx``. Where the output holds derivatives by the input, a forward takes more products a layer (``PASSES``),
    and the backward two for each.
    """
    counted: list[int] = []

    def count(layer: nn.Module, x: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
        map_of_rows = x[0] if isinstance(layer, _ConvTransposeNd) else y
        counted.append(2 * map_of_rows.numel() * layer.weight[0].numel())

    with torch.device("meta"), torch.no_grad():
        module = plain(workload)
        for layer in module.modules():
            if isinstance(layer, (nn.Linear, _ConvNd)):
                layer.register_forward_hook(count)
        module(torch.empty(input_shape(workload)))
    forward = sum(counted)
    if isinstance(workload, Converted) and workload.network in PASSES:
        forward *= PASSES[workload.network]
        return forward, 3 * forward
    return forward, 3 * forward - (0 if input_needs_gradient(workload) else counted[0])

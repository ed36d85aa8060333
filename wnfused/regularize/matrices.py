"""The matrices of a model's layers, all of one shape together.

A linear layer's matrix is its weight ``[c_out, c_in]``; a convolution's is ``[c_out, c_in * taps]``, one for each
group, whatever the layout of the weight. A stage gives two for each of its blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn.modules.lazy import LazyModuleMixin

from wnfused import functional
from wnfused._modules import Filter, is_sharded, sharded_error
from wnfused.init.graph import is_layer
from wnfused.init.units import parameters_of, stored_parameters_of
from wnfused.nn import WNResidualStage
from wnfused.nn._layer import refuse_shapeless
from wnfused.ops._arguments import autocast_is_on, floating

P = ParamSpec("P")
T = TypeVar("T")

WEIGHTS = ("effective", "direction")


def check_like(name: str, t: Tensor, w: Tensor, shape: Sequence[int]) -> None:
    """A floating-point tensor of this shape, on the device of w."""
    floating(name, t)
    if list(t.shape) != list(shape):
        raise ValueError(f"{name}: shape {list(t.shape)} does not fit; use {list(shape)}")
    if t.device != w.device:
        raise ValueError(f"{name}: is on {t.device}, w on {w.device}; use one device")


def check_finite(**tensors: Tensor) -> None:
    """Each without NaN or inf, as far as its numbers can be seen."""
    for name, t in tensors.items():
        if can_be_seen(t) and not t.isfinite().all():
            raise ValueError(f"{name}: has NaN or inf")


def can_be_seen(t: Tensor) -> bool:
    """Whether a decision may depend on a tensor's numbers: not in a trace, under vmap or on the meta device."""
    if torch.compiler.is_compiling() or t.is_meta or is_fake(t):
        return False
    # Of grad within vmap the batch is what the gradient's own wrapper holds.
    while is_functorch_wrapped_tensor(t):
        if is_batchedtensor(t):
            return False
        t = get_unwrapped(t)
    return True


def check_matrices(w: Tensor) -> None:
    """``w [..., r, c]``, floating point."""
    floating("w", w)
    if w.dim() < 2 or 0 in w.shape[-2:]:
        raise ValueError(f"w: shape {list(w.shape)} must be [..., r, c]")


def at_its_own_precision(function: Callable[P, T]) -> Callable[P, T]:
    """A function of a tensor ``w`` whose products autocast leaves alone: rounded ones are not orthogonal."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        w = args[0] if args else kwargs.get("w")
        device = w.device.type if isinstance(w, Tensor) else "cpu"
        if not autocast_is_on(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return wrapped


@dataclass(frozen=True)
class Layers:
    """Layers whose matrices have one shape. ``names`` and ``counts``: how many matrices each layer gives."""

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    counts: tuple[int, ...]
    matrices: Tensor


def matrices(model: nn.Module, filter: Filter | None = None, weight: str = "effective") -> list[Layers]:
    """``[n, r, c]`` for every shape, dtype and device, with their graph to the parameters; none of layers without an
    input or output. Of layers that share their parameters the first stands for all.

    ``weight`` says which matrix of a weight-normalised layer: ``"effective"``, ``g_i v_i / ||v_i||``, which multiplies
    the input; or ``"direction"``, ``v_i / ||v_i||``, which leaves g free.
    """
    groups: dict[tuple[object, ...], list[tuple[str, nn.Module, Tensor]]] = {}
    seen: set[tuple[int, int]] = set()
    for name, layer in layers(model):
        if filter is not None and not filter(name, layer):
            continue
        held = stored_parameters_of(layer)
        if held is not None:
            v, g, _ = held
            # Other gains on shared directions make another matrix, but no other directions.
            shared = id(v), id(g) if g is None or weight == "effective" else 0
            if shared in seen:
                continue
            seen.add(shared)
        for part, matrix in of_layer(name, layer, weight):
            if matrix.numel():
                key = (matrix.shape[-2:], matrix.dtype, matrix.device)
                groups.setdefault(key, []).append((part, layer, matrix))
    return [
        Layers(
            tuple(name for name, _, _ in group),
            tuple(layer for _, layer, _ in group),
            tuple(len(matrix) for _, _, matrix in group),
            group[0][2] if len(group) == 1 else torch.cat([matrix for _, _, matrix in group]),
        )
        for group in groups.values()
    ]


def layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers that have matrices, by name; ValueError where one is lazy and has no shape yet."""
    for name, module in model.named_modules():
        if is_layer(module):
            if isinstance(module, LazyModuleMixin):  # it becomes another class with its shape
                refuse_shapeless(model)
            yield name, module


def of_layer(name: str, layer: nn.Module, weight: str) -> Iterator[tuple[str, Tensor]]:
    """Named matrices ``[n, r, c]`` of one layer; a stage's transition block is made of layers of its own."""
    if isinstance(layer, WNResidualStage):
        _refuse_sharded(name, layer.weight_v)
        if layer.weight_v.numel():
            gains = layer.weight_g if weight == "effective" else torch.ones_like(layer.weight_g)
            rows = functional.weight_norm(layer.weight_v.flatten(0, 2).flatten(1), gains.flatten())
            yield name, rows.view(-1, layer.out_channels, rows.shape[1])
        return
    held = parameters_of(layer)
    if held is None:
        assert isinstance(layer.weight, Tensor)
        _refuse_sharded(name, layer.weight)
        yield name, as_matrices(layer, layer.weight)
        return
    v, g, dim = held
    _refuse_sharded(name, v)
    w = v if g is None else functional.weight_norm(v, g if weight == "effective" else torch.ones_like(g), dim)
    yield name, as_matrices(layer, w)


def _refuse_sharded(name: str, weight: Tensor) -> None:
    if is_sharded(weight):
        remedy = "leave it out by filter; DistributedDataParallel leaves weights whole"
        raise sharded_error(f"model: the weight of {name!r}", remedy)


def as_matrices(layer: nn.Module, w: Tensor) -> Tensor:
    """``[groups, c_out / groups, c_in / groups * taps]`` of a layer's weight."""
    groups = getattr(layer, "groups", 1)
    assert isinstance(groups, int)
    w = w.reshape(groups, w.shape[0] // groups, *w.shape[1:])
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        w = w.transpose(1, 2)
    return w.flatten(2)


def from_matrices(layer: nn.Module, matrices: Tensor, shape: torch.Size) -> Tensor:
    """What ``as_matrices`` takes apart."""
    if not isinstance(layer, nn.modules.conv._ConvTransposeNd):
        return matrices.reshape(shape)
    groups = matrices.shape[0]
    kernels = matrices.reshape(groups, shape[1], shape[0] // groups, *shape[2:])
    return kernels.transpose(1, 2).reshape(shape)

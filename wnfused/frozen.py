"""``frozen``: weights that do not change for a while are normalised once."""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from wnfused import dispatch
from wnfused._modules import check_module, is_sharded
from wnfused._spatial import extents, zeros_around
from wnfused.backends import native
from wnfused.fold import plain_layer
from wnfused.functional import weight_norm_many
from wnfused.nn import WeightNormalised, WNLinear
from wnfused.nn._frozen import ByPixels, Kept, Plain
from wnfused.nn._layer import refuse_shapeless
from wnfused.nn._rule import computed_parameters


@dataclass
class _Held:
    """How many contexts hold a layer's weights, and the hook that follows ``load_state_dict`` meanwhile."""

    contexts: int
    hook: RemovableHandle


_held: WeakKeyDictionary[nn.Module, _Held] = WeakKeyDictionary()
# Reentrant, since the garbage collector may close a context that nobody left while another one is entered.
_lock = threading.RLock()


@contextlib.contextmanager
def frozen(model: nn.Module) -> Iterator[nn.Module]:
    """Within this context the weights of ``model`` do not change, and each effective weight is computed once.

    For inference on a model that trains again later; ``wnfused.fold`` is the way out for good. Where a gradient of
    the parameters is recorded, and for calls on other parameters (``torch.func.functional_call``), layers run as
    always. Nothing else can be trusted to tell that weights stayed the same: writes through ``.data`` leave no trace.

    ``load_state_dict`` inside the context brings the layers that it loads up to date. Every other write to a frozen
    parameter, an optimiser's step say, goes unseen until the context ends.

    Contexts nest and overlap, in one thread or in several: the weights that the first one found stay those until the
    last one ends.

    The weights of all layers are computed in one call on entry (``wnfused.functional.weight_norm_many``).

    Convolutions whose products the C++ kernels take themselves (float32 on the CPU, bfloat16 under autocast, mostly)
    keep copies of v and g instead; where they are normalised along another dim than their rows, of the weight and the
    norms of its rows. They also keep the packed weights, from their first call on, where reading those is faster than
    packing again: from 65,536 weights on, but for 3x3 layers by Winograd's method in two dims (``docs/limits.md``) and
    1x1 layers of more than 64 pixels. That takes as much memory as v, of windows along lines up to twice as much.
    Linear layers of more than one feature keep copies, too, since their kernels normalise while they read v: in float32
    by AVX2 of up to 4,096 inputs, in bfloat16 by AVX512_BF16 from 65,536 weights on, and on tiles where the inputs are
    no multiple of 32. Other convolutions keep them beside their weights, for maps of up to eight pixels.

    Layers whose parameters are parametrised, pruned or sharded run as always, and those whose options are set anew
    inside the context. So do residual stages: they normalise and pack a weight while the convolution before it runs.
    Packed ahead, measured on the three stages of WRN-304, they would be 0 to 5% faster for a second copy of their
    weights.

    Args:
        model: any module; its ``wnfused.WNLinear`` and ``WNConv`` layers are frozen.

    Yields:
        ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: a lazy layer of it has no shape yet.
        RuntimeError: on a write to a layer's ``weight`` inside the context.
    """
    check_module(model=model)
    layers = [m for m in model.modules() if isinstance(m, WeightNormalised) and _can_be_frozen(m)]
    if any(is_lazy(layer.weight_v) for layer in layers):
        refuse_shapeless(model)
    entered: list[WeightNormalised] = []
    try:
        with _lock:
            _hold(layers, entered)
        yield model
    finally:
        with _lock:
            for layer in entered:
                _let_go(layer)


def _can_be_frozen(layer: WeightNormalised) -> bool:
    """Whether its parameters are parameters, and whole: not parametrised, pruned or sharded."""
    return not computed_parameters(layer) and not any(map(is_sharded, layer.parameters(recurse=False)))


def _hold(layers: Sequence[WeightNormalised], entered: list[WeightNormalised]) -> None:
    """One context more for each layer, which joins those that were entered; what no other one holds is frozen."""
    fresh = [layer for layer in layers if layer not in _held]
    forms = dict(zip(fresh, _constants(fresh), strict=True))
    for layer in layers:
        if layer in forms:
            _held[layer] = _Held(0, layer.register_load_state_dict_post_hook(_refresh))
            object.__setattr__(layer, "_frozen", forms[layer])
        _held[layer].contexts += 1
        entered.append(layer)


def _let_go(layer: WeightNormalised) -> None:
    held = _held[layer]
    held.contexts -= 1
    if held.contexts == 0:
        layer.__dict__.pop("_frozen", None)
        held.hook.remove()
        del _held[layer]


def _refresh(layer: nn.Module, _: Any) -> None:
    """After ``load_state_dict``. Copies of a frozen layer have this hook, too, and what ``fold`` makes of it, but
    nothing to bring up to date."""
    with _lock:
        if isinstance(layer, WeightNormalised) and layer._frozen is not None:
            object.__setattr__(layer, "_frozen", _constants([layer])[0])


@torch.no_grad()
def _constants(layers: Sequence[WeightNormalised]) -> list[nn.Module]:
    """The layers' plain forms, or copies, with parameters of their own that record no gradient."""
    groups: dict[tuple[int | None, torch.device], list[int]] = {}
    given, layers = layers, [_by_rows(_by_dims(layer)) for layer in layers]
    for i, layer in enumerate(layers):
        if not _has_own_products(layer):
            groups.setdefault((layer.dim, layer.weight_v.device), []).append(i)
    weights: dict[int, Tensor] = {}
    for (dim, _), members in groups.items():
        chosen = [layers[i] for i in members]
        found = weight_norm_many([m.weight_v for m in chosen], [m.weight_g for m in chosen], dim)
        weights.update(zip(members, found, strict=True))
    forms = [_by_pixels(layer, weights[i]) if i in weights else _own(layer) for i, layer in enumerate(layers)]
    for layer, form in zip(given, forms, strict=True):
        # The forms are nobody's submodules: they stay as they are where the model is moved.
        form.__dict__["made_for"] = (layer.weight_v.dtype, layer.weight_v.device)
        form.__dict__["made_of"] = tuple(layer._parameters.values())
    return forms


def _by_dims(layer: WeightNormalised) -> WeightNormalised:
    """A convolution whose options were set anew, to one number for all dims, as one with a number for each."""
    if not isinstance(layer, _ConvNd):
        return layer
    options = {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "output_padding")}
    if all(isinstance(value, (tuple, list, str)) for value in options.values()):
        return layer
    dims, copied = layer.weight_v.dim() - 2, copy.copy(layer)
    for name, value in options.items():
        setattr(copied, name, value if isinstance(value, str) else extents(name, value, dims, None))
    return copied


def _by_rows(layer: WeightNormalised) -> WeightNormalised:
    """A convolution that is normalised along another dim, as one of rows where there are kernels for those: its ``v``
    is the weight, ``g`` the norms of the weight's rows."""
    if not isinstance(layer, _ConvNd) or layer.dim == 0:
        return layer
    rows = _copy(layer)
    rows.dim = 0
    if not _has_own_products(rows):
        return layer
    (weight,) = weight_norm_many([layer.weight_v], [layer.weight_g], layer.dim)
    norms = torch.linalg.vector_norm(weight.flatten(1), dim=1).reshape(-1, *[1] * (weight.dim() - 1))
    rows._parameters |= {
        "weight_v": nn.Parameter(weight, requires_grad=False),
        "weight_g": nn.Parameter(norms, requires_grad=False),
    }
    return rows


def _by_pixels(layer: WeightNormalised, weight: Tensor) -> nn.Module:
    """The plain layer, and where the kernels are faster than it on a few pixels a copy of this one."""
    plain = Plain(_constant(layer, weight), layer.activation, layer.negative_slope)
    conv = _open_convolution(layer)
    if conv is None or not native.takes_few_pixels(layer.weight_v, conv.groups, conv.transposed):
        return plain
    pixels = native.bounds().few_pixels * (1 if conv.transposed else math.prod(conv.stride))
    return ByPixels(_copy(layer), plain, conv.in_channels * pixels)


def _constant(layer: WeightNormalised, weight: Tensor) -> nn.Module:
    plain = plain_layer(layer, weight=weight)
    bias = layer._parameters["bias"]
    plain._parameters = {
        "weight": plain._parameters["weight"],
        "bias": None if bias is None else nn.Parameter(bias.detach().clone()),
    }
    plain._modules = {}
    return plain.requires_grad_(False)


def _has_own_products(layer: WeightNormalised) -> bool:
    if layer.dim != 0 or not dispatch.prefers_native():
        return False
    if isinstance(layer, WNLinear):
        return native.takes_linear(layer.weight_v)
    if not isinstance(layer, _ConvNd):
        return False
    padding: Any = layer.padding
    if layer.padding_mode != "zeros":
        padding = (0,) * len(layer.kernel_size)  # of the map with its border
    elif isinstance(padding, str):
        padding, _ = zeros_around(padding, layer.kernel_size, layer.dilation)
    return native.takes_conv(layer.weight_v, layer.stride, padding, layer.dilation, layer.groups, layer.transposed)


def _open_convolution(layer: WeightNormalised) -> _ConvNd | None:
    """The layer, if it is a convolution and its options leave it to the kernels."""
    if not isinstance(layer, _ConvNd) or layer.padding_mode != "zeros" or layer.dim != 0:
        return None
    return layer if not isinstance(layer.padding, str) and dispatch.prefers_native() else None


def _own(layer: WeightNormalised) -> nn.Module:
    copied = _copy(layer)
    return copied if _open_convolution(layer) is None else Kept(copied)


def _copy(layer: WeightNormalised) -> WeightNormalised:
    copied = copy.copy(layer)
    copied._parameters = {
        name: None if p is None else nn.Parameter(p.detach().clone(), requires_grad=False)
        for name, p in layer._parameters.items()
    }
    return copied

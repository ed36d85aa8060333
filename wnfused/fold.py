"""Out of this package: ``fold`` puts plain torch layers with the effective weights where its layers stand."""

from __future__ import annotations

import logging
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from wnfused._modules import is_sharded, sharded_error
from wnfused._surgery import LAYERS, OPTIONS, additions, checked, move_hooks, named, replace, twin
from wnfused._tracing import given_a_residual
from wnfused.convert import FusedActivation
from wnfused.nn import PlainResidualBlock, WeightNormalised, WNResidualBlock, WNResidualStage
from wnfused.nn._rule import PARAMETERS, computed_parameters
from wnfused.nn.plain import WITH_RESIDUAL, attach_activation
from wnfused.nn.residual import separate_blocks

logger = logging.getLogger("wnfused.fold")

_FOLDED = (*LAYERS.values(), WNResidualBlock, WNResidualStage)


@torch.inference_mode(False)  # parameters made in that mode could never be trained
@torch.no_grad()
def fold(model: nn.Module) -> nn.Module:
    """Replaces this package's layers by plain torch layers with the effective weights, for inference and export.

    Each layer becomes the torch layer it extends, with ``weight = g v / ||v||`` under the name ``weight``; attributes,
    buffers, hooks, modes, shared modules and tied weights stay. A fused activation comes back where ``convert``
    found it; that of a layer built with ``activation=...`` becomes the layer's child module ``activation``, applied by
    a forward hook, so that names and ``weight`` stay where they were. A layer that a trace of the model sees called
    with a residual becomes a subclass of torch's that takes one. Residual blocks become
    ``wnfused.nn.PlainResidualBlock``, whose layers are torch's, and stages an ``nn.Sequential`` of these. Subclasses of
    this package's layers that add more than a constructor are left alone, and named in a warning of the logger
    ``wnfused.fold``; so are layers whose parameters are parametrised or pruned, with the block or stage that they are
    in, blocks that were given other activations, stages that were given other children, and what has a ``forward`` of
    its own.

    Folding twice changes nothing more. ``convert(model, plain=True)`` is the way back: the same function with
    ``v = w, g = ||w||``, on a CPU bit for bit in float32 and float64. The lengths of the old ``v`` are gone, and with
    them the step size of its directions: to train on exactly as before, keep a copy, or use ``wnfused.frozen``, which
    folds for a while only.

    Args:
        model: changed in place.

    Returns:
        ``model``; or the new layer, where ``model`` itself is one.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``model`` is or holds a ``DistributedDataParallel``; fold what it wraps. A parameter of one of this
            package's layers is sharded; nothing has been changed then.
    """
    model = checked(model, "fold")
    markers = [module for module in model.modules() if isinstance(module, FusedActivation)]
    restored = {marker.layer for marker in markers}
    replaced: dict[nn.Module, nn.Module] = {marker: marker.activation for marker in markers}
    takes_residual = given_a_residual(model, logger)
    folded = _Folded()
    inside: set[nn.Module] = set()
    for name, module in named(model):
        if module in inside or not isinstance(module, (WNResidualStage, WNResidualBlock, WeightNormalised)):
            continue
        inside.update(module.modules())
        _refuse_sharded(name, module)
        if any(map(is_lazy, module.parameters())):
            logger.warning("%s: left alone, it has no shape yet; run the model once, then fold", name)
            continue
        if "forward" in vars(module):
            logger.warning("%s: left alone, it has its own attribute 'forward'", name)
            continue
        computed = _computed(module)
        if computed is not None:
            logger.warning("%s: left alone, its %s", name, computed)
            continue
        known = additions(type(module), _FOLDED)
        assert known is not None
        if type(module) is not known[0] and known[1]:
            logger.warning("%s: left alone, %s has its own %s", name, type(module).__name__, ", ".join(known[1]))
            continue
        block = module.transition if isinstance(module, WNResidualStage) else module
        if isinstance(block, WNResidualBlock) and (block.conv1.activation, block.conv2.activation) != ("relu", None):
            logger.warning("%s: left alone, a block was given other activations than its ReLU", name)
            continue
        if isinstance(module, WNResidualStage):
            others = sorted(set(module._modules) - {"transition"})
            if others:
                logger.warning("%s: left alone, it has other children: %s", name, ", ".join(others))
                continue
            replaced[module] = folded.stage(module)
        elif isinstance(module, WNResidualBlock):
            replaced[module] = folded.block(module)
        else:
            replaced[module] = folded.layer(module, module not in restored, module in takes_residual)
        logger.info("%s: now %s", name, type(replaced[module]).__name__)
    for marker in markers:
        marker.activation.train(marker.training)
    return replace(model, replaced)


def _refuse_sharded(name: str, module: nn.Module) -> None:
    for path, parameter in module.named_parameters(prefix=name):
        if is_sharded(parameter):
            remedy = "fold before the model is sharded, or load its full state dict into one that is not, and fold that"
            raise sharded_error(f"model: {path!r}", remedy)


def _computed(module: nn.Module) -> str | None:
    """What something else computes of a module, or of the layers within a block or a stage, in words."""
    for path, part in module.named_modules():
        if not isinstance(part, (WNResidualStage, WeightNormalised)):
            continue
        prefix = f"{path}." if path else ""
        if parametrize.is_parametrized(part):
            return f"{', '.join(prefix + p for p in cast(nn.ModuleDict, part.parametrizations))} is parametrised"
        if names := computed_parameters(part):
            return f"{', '.join(prefix + p for p in names)} is no parameter: is it pruned?"
    return None


def plain_layer(
    layer: WeightNormalised, *, with_residual: bool = False, weight: Tensor | None = None
) -> nn.Module:  # fmt: skip
    """The torch layer with the effective weight, which a caller may have at hand, and the same bias; no activation."""
    kind = next(k for k, ours in LAYERS.items() if isinstance(layer, ours))
    if weight is None:
        weight = layer.weight.detach().as_subclass(Tensor).clone()
    learns = layer.weight_v.requires_grad or layer.weight_g.requires_grad
    own = {*OPTIONS, "_frozen", "_converted", *PARAMETERS}
    plain = twin(layer, WITH_RESIDUAL[kind] if with_residual else kind, known=LAYERS[kind], without=own)
    others = dict(plain._parameters)
    plain._parameters.clear()
    plain._parameters.update(weight=nn.Parameter(weight, learns), bias=layer._parameters["bias"], **others)
    return plain


class _Folded:
    """What layers, blocks and stages fold to; layers that share ``v`` and ``g``, or are one, share the weight."""

    def __init__(self) -> None:
        self._weights: dict[tuple[int, int, int | None], nn.Parameter] = {}
        self._within_blocks: dict[nn.Module, nn.Module] = {}

    def layer(self, layer: WeightNormalised, with_activation: bool, with_residual: bool = False) -> nn.Module:
        """The plain layer that takes a layer's place, with its hooks, and its fused activation if asked for."""
        plain = plain_layer(layer, with_residual=with_residual)
        weight = cast(nn.Parameter, plain._parameters["weight"])
        weight = self._weights.setdefault((id(layer.weight_v), id(layer.weight_g), layer.dim), weight)
        plain._parameters["weight"] = weight
        move_hooks(layer, plain)
        if with_activation and layer.activation is not None:
            activation = nn.ReLU() if layer.activation == "relu" else nn.LeakyReLU(layer.negative_slope)
            attach_activation(plain, activation.train(layer.training))
        return plain

    def block(self, block: WNResidualBlock) -> PlainResidualBlock:
        plain = twin(block, PlainResidualBlock, known=WNResidualBlock, without=("num_blocks", *_PARTS))
        assert isinstance(plain, PlainResidualBlock)
        plain.conv1 = self._part(block.conv1, with_activation=False)  # type: ignore[assignment]
        plain.relu = nn.ReLU().train(block.training)
        plain.conv2 = self._part(block.conv2)  # type: ignore[assignment]
        shortcut = block.shortcut
        plain.shortcut = self._part(shortcut) if isinstance(shortcut, WeightNormalised) else shortcut
        move_hooks(block, plain)
        return plain

    def _part(self, layer: WeightNormalised, with_activation: bool = True) -> nn.Module:
        """A layer of a block, that blocks may share."""
        if layer not in self._within_blocks:
            self._within_blocks[layer] = self.layer(layer, with_activation)
        return self._within_blocks[layer]

    def stage(self, stage: WNResidualStage) -> nn.Sequential:
        own = {*_OF_STAGE, *PARAMETERS, "transition"}
        plain = twin(stage, nn.Sequential, known=WNResidualStage, without=own)
        assert isinstance(plain, nn.Sequential)
        if stage.transition is not None:
            plain.append(self.block(stage.transition))
        for block in separate_blocks(stage):
            plain.append(self.block(block))
        move_hooks(stage, plain)
        return plain


_PARTS = ("conv1", "conv2", "shortcut")
"""Children of a block."""

_OF_STAGE = ("in_channels", "out_channels", "stride", "num_blocks", "recompute", "skip_scale", "init")
"""Attributes that a stage has beside those of an ``nn.Sequential``."""

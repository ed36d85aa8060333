"""Into this package and out again: ``convert`` swaps layers in, ``fold`` gives plain torch layers back."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm

from wnfused.nn import (
    PlainResidualBlock,
    WeightNormalised,
    WNConv1d,
    WNConv2d,
    WNConv3d,
    WNConvTranspose1d,
    WNConvTranspose2d,
    WNConvTranspose3d,
    WNLinear,
    WNResidualBlock,
    WNResidualStage,
)
from wnfused.nn._layer import row_norm

logger = logging.getLogger("wnfused.convert")

LAYERS: dict[type[nn.Module], type[WeightNormalised]] = {
    nn.Linear: WNLinear,
    nn.Conv1d: WNConv1d,
    nn.Conv2d: WNConv2d,
    nn.Conv3d: WNConv3d,
    nn.ConvTranspose1d: WNConvTranspose1d,
    nn.ConvTranspose2d: WNConvTranspose2d,
    nn.ConvTranspose3d: WNConvTranspose3d,
}
"""Which layer replaces which of torch's."""

CONV_ARGUMENTS = (
    "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode",
)  # fmt: skip

FOLDED = {*LAYERS.values(), WNResidualBlock, WNResidualStage}
"""What :func:`fold` takes; a subclass may compute something else."""

HOOK_TABLES = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
    "_state_dict_hooks", "_state_dict_pre_hooks",
)  # fmt: skip

Filter = Callable[[str, nn.Module], bool]


class FusedActivation(nn.Identity):
    """Stands where an activation was that its layer now applies; keeps it for :func:`fold`."""

    activation: nn.Module
    layer: nn.Module

    def __init__(self, activation: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        # Neither is a submodule: the activation no longer runs, the layer stands elsewhere in the model.
        object.__setattr__(self, "activation", activation)
        object.__setattr__(self, "layer", layer)

    def extra_repr(self) -> str:
        return f"{self.activation} is applied by the layer before"


# ------------------------------------------------------------------------------------------------------ convert


def convert(
    model: nn.Module, *, plain: bool = False, filter: Filter | None = None, fuse_activation: bool = True
) -> nn.Module:
    """Replaces torch's weight-normalised layers by this package's; the function computed stays the same.

    Taken are ``torch.nn.utils.weight_norm`` and ``torch.nn.utils.parametrizations.weight_norm`` on ``nn.Linear``,
    ``nn.Conv1d/2d/3d`` and ``nn.ConvTranspose1d/2d/3d``. Parameters are carried over as the objects they are, so an
    optimiser that holds them goes on.
    Custom subclasses are left alone and named in the log (logger ``wnfused.convert``).

    Args:
        model: changed in place.
        plain: also take layers without any weight norm, with ``v = w`` and ``g = ||w||``.
        filter: ``filter(name, module)`` says which of them to take; all if None.
        fuse_activation: let a layer apply the ReLU or LeakyReLU module that follows it, where a trace of the model
            shows that this is the layer's only use and the activation's only input, and neither has hooks.

    Returns:
        ``model``; or the new layer, where ``model`` itself is one.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    fusable = _fusable_activations(model) if fuse_activation else {}
    replaced: dict[nn.Module, nn.Module] = {}
    for name, module in model.named_modules():
        form = _weight_norm_form(module)
        if (form is None and not plain) or (filter is not None and not filter(name, module)):
            continue
        kind = _torch_type(module)
        if kind is None:
            if isinstance(module, tuple(LAYERS)) and not isinstance(module, WeightNormalised):
                logger.warning("%s: left alone, %s is a subclass of torch's layer", name, type(module).__name__)
            elif form is not None:
                logger.warning("%s: left alone, no layer here replaces %s", name, type(module).__name__)
            continue
        if not _holds_parameters(module, form):
            logger.warning("%s: left alone, its weight or bias is computed by something else", name)
            continue
        layer = _weight_normalised(module, kind, form)
        activation = fusable.get(module)
        if activation is not None:
            layer.activation, layer.negative_slope = _activation_of(activation)
            replaced[activation] = FusedActivation(activation, layer)
        replaced[module] = layer
        logger.info("%s: %s", name, layer)
    return _replace(model, replaced)


def _torch_type(module: nn.Module) -> type[nn.Module] | None:
    """The torch layer a module is, exactly; torch's parametrisation makes a subclass of its own, which counts."""
    kind = type(module)
    if parametrize.is_parametrized(module):
        kind = kind.__bases__[0]
    return kind if kind in LAYERS else None


def _weight_norm_form(module: nn.Module) -> tuple[nn.Parameter, nn.Parameter, int] | None:
    """``(v, g, dim)`` of a layer under either of torch's weight norms on ``weight`` alone; None otherwise."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm) and hook.name == "weight":
            return cast(nn.Parameter, module.weight_v), cast(nn.Parameter, module.weight_g), hook.dim
    if parametrize.is_parametrized(module, "weight"):
        weight = cast(nn.ModuleDict, module.parametrizations)["weight"]
        if isinstance(weight, nn.ModuleList) and len(weight) == 1 and isinstance(weight[0], _WeightNorm):
            g, v = (cast(nn.Parameter, getattr(weight, f"original{i}")) for i in (0, 1))
            return v, g, weight[0].dim
    return None


def _holds_parameters(module: nn.Module, form: tuple[nn.Parameter, nn.Parameter, int] | None) -> bool:
    """Nothing but torch's weight norm stands between the module and its parameters: no spectral norm, no pruning."""
    weights = [module._parameters.get("weight")] if form is None else form[:2]
    parametrised = set(getattr(module, "parametrizations", ())) - {"weight" if form is not None else ""}
    return not parametrised and all(isinstance(w, nn.Parameter) for w in weights) and "bias" in module._parameters


def _weight_normalised(
    module: nn.Module, kind: type[nn.Module], form: tuple[nn.Parameter, nn.Parameter, int] | None
) -> WeightNormalised:
    """A layer of this package around the module's own parameters."""
    if form is not None:
        v, g, torch_dim = form
        dim: int | None = None if torch_dim == -1 else torch_dim
    else:
        v, dim = cast(nn.Parameter, module.weight), 0
        norms = row_norm(v).to(v.dtype).reshape([-1] + [1] * (v.dim() - 1))
        g = nn.Parameter(norms, requires_grad=v.requires_grad)
    arguments: dict[str, Any]
    if kind is nn.Linear:
        arguments = {"in_features": module.in_features, "out_features": module.out_features}
    else:
        arguments = {name: getattr(module, name) for name in CONV_ARGUMENTS}
        if isinstance(module, nn.modules.conv._ConvTransposeNd):
            arguments["output_padding"] = module.output_padding
    bias = module.bias
    layer = LAYERS[kind](**arguments, bias=bias is not None, device="meta", dim=dim)
    layer.register_parameter("weight_v", v)
    layer.register_parameter("weight_g", g)
    layer.register_parameter("bias", bias)  # type: ignore[arg-type]
    _carry_over(module, layer)
    return layer


def _carry_over(old: nn.Module, new: nn.Module) -> None:
    """Training mode and hooks; torch's own weight-norm hook has done its work and stays behind."""
    new.training = old.training
    for name in HOOK_TABLES:
        if name in old.__dict__:  # the tables themselves, so that the handles of hooks go on removing them
            object.__setattr__(new, name, old.__dict__[name])
    pre_hooks = new._forward_pre_hooks
    for key in [key for key, hook in pre_hooks.items() if isinstance(hook, WeightNorm)]:
        del pre_hooks[key]


def _has_hooks(module: nn.Module) -> bool:
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(not isinstance(hook, WeightNorm) for name in names for hook in getattr(module, name).values())


def _activation_of(module: nn.Module) -> tuple[str, float]:
    if isinstance(module, nn.LeakyReLU):
        return "leaky_relu", module.negative_slope
    return "relu", 0.01


class _LayerTracer(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        return isinstance(module, (*LAYERS, WNResidualStage)) or super().is_leaf_module(module, qualified_name)


def _fusable_activations(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Each layer whose only use is the activation module next to it in an ``nn.Sequential``; empty without a trace.

    One trace shows one way through a model. Neighbours in a sequence are a pair in all of them; a layer and an
    activation that a ``forward`` calls one by one may part ways under a flag, in evaluation, or in another method.
    """
    neighbours = {
        (before, after)
        for sequence in model.modules()
        if isinstance(sequence, nn.Sequential) and type(sequence).forward is nn.Sequential.forward
        for before, after in itertools.pairwise(sequence)
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = _LayerTracer().trace(model)
    except Exception as reason:  # a trace runs the user's own code, which may raise anything
        logger.info("activations are not fused: the model does not trace (%s)", reason)
        return {}
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    calls: dict[nn.Module, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(modules[str(node.target)], []).append(node)
    found: dict[nn.Module, nn.Module] = {}
    for module, nodes in calls.items():
        if not isinstance(module, (nn.ReLU, nn.LeakyReLU)) or len(nodes) != 1 or _has_hooks(module):
            continue
        if isinstance(module, nn.LeakyReLU) and module.negative_slope < 0:
            continue
        before = nodes[0].args[0] if nodes[0].args else None
        if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) != 1:
            continue
        layer = modules[str(before.target)]
        if (
            (layer, module) in neighbours
            and _torch_type(layer) is not None
            and len(calls[layer]) == 1
            and not _has_hooks(layer)
        ):
            found[layer] = module
    return found


def _replace(model: nn.Module, replaced: dict[nn.Module, nn.Module]) -> nn.Module:
    """Puts every replacement wherever its module stands, shared modules in all their places."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replaced:
                parent._modules[name] = replaced[child]
    return replaced.get(model, model)


# --------------------------------------------------------------------------------------------------------- fold


@torch.no_grad()
def fold(model: nn.Module) -> nn.Module:
    """Replaces this package's layers by plain torch layers with the effective weights, for inference and export.

    A fused activation comes back as a module of its own: where :func:`convert` found it, or behind the layer in an
    ``nn.Sequential``. Residual blocks and stages become plain blocks. Folding twice changes nothing more.

    Args:
        model: changed in place.

    Returns:
        ``model``; or the new layer, where ``model`` itself is one.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    markers = [module for module in model.modules() if isinstance(module, FusedActivation)]
    restored = {marker.layer for marker in markers}
    replaced: dict[nn.Module, nn.Module] = {marker: marker.activation for marker in markers}
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside:
            continue
        if isinstance(module, (WNResidualStage, WNResidualBlock, WeightNormalised)) and type(module) not in FOLDED:
            logger.warning("left alone, %s is a subclass", type(module).__name__)
        elif isinstance(module, WNResidualStage):
            blocks = [_plain_block(block) for block in module.unstack()]  # type: ignore[arg-type]
            replaced[module] = nn.Sequential(*blocks).train(module.training)
        elif isinstance(module, WNResidualBlock):
            replaced[module] = _plain_block(module)
        elif isinstance(module, WeightNormalised):
            replaced[module] = _folded(module, with_activation=module not in restored)
        else:
            continue
        inside.update(module.modules())
    return _replace(model, replaced)


def plain_layer(layer: WeightNormalised) -> nn.Module:
    """The torch layer with the effective weight and the same bias, without activation or hooks."""
    kind = next(k for k, wn in LAYERS.items() if isinstance(layer, wn))
    plain = kind.__new__(kind)
    nn.Module.__init__(plain)
    skip = {"activation", "negative_slope", "gamma", "init", "dim", "_frozen"}
    plain.__dict__.update({k: v for k, v in layer.__dict__.items() if k not in skip and k not in plain.__dict__})
    weight = layer.weight.detach().as_subclass(torch.Tensor).clone()
    plain.weight = nn.Parameter(weight, requires_grad=layer.weight_v.requires_grad)
    plain.register_parameter("bias", layer._parameters["bias"])
    return plain


def _folded(layer: WeightNormalised, *, with_activation: bool = True) -> nn.Module:
    """The plain layer that takes a layer's place, with its hooks, and its fused activation behind it if asked for."""
    plain = plain_layer(layer)
    _carry_over(layer, plain)
    if not with_activation or layer.activation is None:
        return plain
    activation = nn.ReLU() if layer.activation == "relu" else nn.LeakyReLU(layer.negative_slope)
    return nn.Sequential(plain, activation).train(layer.training)


def _plain_block(block: WNResidualBlock) -> PlainResidualBlock:
    conv = block.conv1
    plain = PlainResidualBlock(
        conv.in_channels, conv.out_channels, conv.stride[0], skip_scale=block.skip_scale, device="meta"
    )
    plain.conv1 = _folded(block.conv1, with_activation=False)  # type: ignore[assignment]
    plain.conv2 = _folded(block.conv2)  # type: ignore[assignment]
    if isinstance(block.shortcut, WeightNormalised):
        plain.shortcut = _folded(block.shortcut)
    _carry_over(block, plain)
    return plain.train(block.training)

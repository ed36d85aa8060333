"""Into this package: ``convert`` puts its layers where torch's weight-normalised ones stand."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm

from wnfused._modules import Filter, class_of, holders, norm_dim
from wnfused._numbers import flag
from wnfused._surgery import (
    LAYERS,
    OPTIONS,
    additions,
    checked,
    move_hooks,
    named,
    own_attributes,
    replace,
    static_methods,
    twin,
)  # fmt: skip
from wnfused._symbolic import name_of_wrapped, wrapped
from wnfused._tracing import Look, fusable_activations, looks, neighbours
from wnfused.nn import PlainResidualBlock, WeightNormalised
from wnfused.nn._layer import row_norm, with_directions
from wnfused.nn.plain import WITH_RESIDUAL, apply_activation, detach_activation

logger = logging.getLogger("wnfused.convert")


class FusedActivation(nn.Identity):
    """Stands where an activation was that its layer now applies; keeps it for ``wnfused.fold``.

    Where the layer was taken out of its sequence since, another one put in its place, the activation runs again. A
    layer that was wrapped applies it inside of the wrapper; a warning names one with parameters of its own, an adapter.
    """

    activation: nn.Module
    layer: nn.Module
    sequence: nn.Module | None = None
    key = ""  # of the layer in the sequence
    wrapper: nn.Module | None = None  # that a warning named

    def __init__(self, activation: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        # Neither is a submodule: the activation no longer runs, the layer stands elsewhere in the model.
        object.__setattr__(self, "activation", activation)
        object.__setattr__(self, "layer", layer)
        self.training = activation.training

    def stand_in(self, sequence: nn.Module, key: str) -> None:
        """Notes the ``nn.Sequential`` in which its layer comes before it, and where there."""
        object.__setattr__(self, "sequence", sequence)
        object.__setattr__(self, "key", key)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = input if self._is_applied() else self.activation(input)
        return output

    def _is_applied(self) -> bool:
        if self.sequence is None:
            return True
        stages = self.sequence._modules
        stage = stages.get(self.key)  # where it was, and mostly is: a search takes as long as the sequence
        if stage is self.layer:
            return True
        if stage is None or not _is_within(self.layer, stage):
            others = (other for other in stages.values() if other is not None)
            stage = next((other for other in others if _is_within(self.layer, other)), None)
        if stage is None:
            return False
        if stage is not self.layer and stage is not self.wrapper and not torch.compiler.is_compiling():
            self._warn_of(stage)
        return True

    def _warn_of(self, wrapper: nn.Module) -> None:
        object.__setattr__(self, "wrapper", wrapper)
        inside = set(self.layer.parameters())
        if inside and not inside.issuperset(wrapper.parameters()):
            logger.warning(
                "%s around %s has parameters of its own, but %s is applied inside of it, by the layer; if it belongs "
                "behind what the wrapper adds (an adapter), convert with fuse_activation=False",
                type(wrapper).__name__, type(self.layer).__name__, self.activation,
            )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.activation} is applied by the layer before"


def _is_within(layer: nn.Module, stage: nn.Module) -> bool:
    return any(module is layer for module in stage.modules())


def convert(
    model: nn.Module, *, plain: bool = False, filter: Filter | None = None, fuse_activation: bool = True
) -> nn.Module:
    """Replaces torch's weight-normalised layers by this package's; the function computed stays the same.

    Taken are ``torch.nn.utils.weight_norm`` and ``torch.nn.utils.parametrizations.weight_norm`` on ``nn.Linear``,
    ``nn.Conv1d/2d/3d`` and ``nn.ConvTranspose1d/2d/3d``, and on subclasses of these that add only a constructor,
    a ``reset_parameters`` (the new layer has this package's) or static methods.
    Parameters are carried over as the objects they are, so an optimiser that holds them goes on; so are buffers,
    attributes, hooks of every kind, training mode, shared modules and tied weights.

    Left alone, and named with the reason in a warning of the logger ``wnfused.convert``: other subclasses, weights
    that something else computes too (pruning, spectral norm, a second parametrisation), weight norm on anything but
    ``weight``, layers without a counterpart here, and plain weights tied to a module that stays as it is. What was
    replaced is logged with level INFO.

    Args:
        model: changed in place.
        plain: also take layers without any weight norm, with ``v = w`` and ``g = ||w||``. Their ``weight_g`` is a new
            parameter: give it to the optimiser. Rows of zeros have ``g = 0`` and a direction of their own in ``v``,
            or neither would ever have a gradient.
        filter: ``filter(name, module)`` says which of them to take; all if None.
        fuse_activation: let a layer apply the ReLU or LeakyReLU module that follows it in an ``nn.Sequential``, where
            symbolic runs of ``forward`` in training and in evaluation show that this is the layer's only use and the
            activation's only input, that neither has hooks, and that ``forward`` goes the same way afterwards: one that
            asks for modules' classes may not, which is warned of. Called without its activation afterwards, by a method
            that is not ``forward``, under another flag, or from a sequence that was cut, such a layer still applies it,
            and what is put in the activation's place comes on top: convert with False a model that is used so.

    Returns:
        ``model``; or the new layer, where ``model`` itself is one.

    Raises:
        TypeError: ``model`` is not a module, ``filter`` not a function, or a flag neither True nor False.
        ValueError: ``model`` is or holds a ``DistributedDataParallel``; convert what it wraps.
    """
    model = checked(model, "convert")
    flag(plain=plain, fuse_activation=fuse_activation)
    if filter is not None and not callable(filter):
        raise TypeError(f"filter: expected a function of a name and a module, got {type(filter).__name__}")
    candidates: dict[nn.Module, _Candidate] = {}
    left: dict[str, list[str]] = {}
    for name, module in named(model):
        candidate = _candidate(module, plain)
        if candidate is None or (filter is not None and not filter("" if module is model else name, module)):
            continue
        if isinstance(candidate, str):
            left.setdefault(candidate, []).append(name)
        else:
            candidates[module] = candidate
    for reason, names in left.items():
        logger.warning("%s: left alone, %s", ", ".join(names), reason)
    if not candidates and not left and filter is None:
        _warn_of_nothing(model, plain)
    _leave_tied_to_others(model, candidates)
    _leave_without_a_norm(model, candidates)
    before = _looks(model, candidates) if fuse_activation else []
    fusable = fusable_activations(neighbours(model), before)
    gains: dict[tuple[int, int | None], nn.Parameter] = {}
    replaced: dict[nn.Module, nn.Module] = {}
    fused: dict[nn.Module, FusedActivation] = {}
    for name, module in named(model):
        if module in candidates:
            layer = _weight_normalised(module, candidates[module], gains)
            activation = fusable.get(module)
            if activation is not None:
                _set_activation(layer, activation)
                replaced[activation] = fused[layer] = FusedActivation(activation, layer)
            replaced[module] = layer
            logger.info("%s: now %s", name, layer)
    converted = replace(model, replaced)
    _note_sequences(converted)
    if before and replaced:
        _check_the_way(converted, before, fused, replaced)
    return converted


def _looks(model: nn.Module, candidates: dict[nn.Module, _Candidate]) -> list[Look]:
    """How ``forward`` goes, if there is something to learn from that; of a single layer there is not."""
    if wrapped(model)[0] in candidates:
        return []
    if neighbours(model):
        return looks(model, logger, "activations are not fused")
    if any(type(module) in LAYERS for module in candidates):
        return looks(model, logger, "its forward is not compared with that of the converted model", logging.DEBUG)
    return []


def _check_the_way(
    model: nn.Module, before: list[Look], fused: dict[nn.Module, FusedActivation], replaced: dict[nn.Module, nn.Module]
) -> None:
    """Parts layers and activations where ``forward`` goes another way for them, and warns if it still does then.

    It may ask for the class or an attribute of a module, or call a layer that was replaced from a closure, say.
    """

    def goes_as_before() -> tuple[bool, set[nn.Module]]:
        after = looks(model, logger, "the converted model", leaves=(FusedActivation,))
        called = set[nn.Module]().union(*(run.calls for run in after))
        return [run.steps for run in after] == [run.steps for run in before], called

    same, called = goes_as_before()
    lost = set(fused) - called
    if lost:
        reason = "the layer that it replaced is still called, from where convert cannot see it"
        _part(model, fused, lost, reason)
    elif not same and fused:
        _part(model, fused, set(fused), "forward goes another way where its activation is fused")
    if not same and not lost and not goes_as_before()[0]:
        asked = set[nn.Module]().union(*(run.calls for run in before))
        missed = {layer for old, layer in replaced.items() if old in asked} - called - set(fused.values())
        names = ", ".join(name for name, layer in named(model) if layer in missed)
        logger.warning(
            "the model: forward goes another way than before, so what it computes may have changed; does it ask for a "
            "layer's class, or for an attribute, or does something hold a layer that was replaced?%s",
            f" Not called any more: {names}" if names else "",
        )


def _part(model: nn.Module, fused: dict[nn.Module, FusedActivation], layers: set[nn.Module], reason: str) -> None:
    """Gives back the activations of some layers."""
    for name, layer in named(model):
        if layer in layers:
            layer.activation = None  # type: ignore[assignment]
            logger.warning("%s: %s", name, reason)
    replace(model, {fused[layer]: fused[layer].activation for layer in layers})


def _note_sequences(model: nn.Module) -> None:
    for module in model.modules():
        stages = module._modules.items() if isinstance(module, nn.Sequential) else ()
        for (key, layer), (_, stage) in pairwise(stages):
            if isinstance(stage, FusedActivation) and stage.layer is layer and stage.sequence is None:
                stage.stand_in(module, key)


def _warn_of_nothing(model: nn.Module, plain: bool) -> None:
    """Where nothing could be taken, unless the layers are of this package already."""
    layers = [module for module in model.modules() if isinstance(module, tuple(LAYERS))]
    if any(isinstance(layer, WeightNormalised) for layer in layers):
        return
    if plain:
        logger.warning("nothing to convert: no layer is one of torch's linear or convolutional ones")
    elif layers:
        logger.warning("nothing to convert: no layer is under torch's weight norm; plain=True takes layers without")


# ------------------------------------------------------------------------------------------------ what can be taken


@dataclass(frozen=True)
class _Candidate:
    """A layer to replace: which of torch's it is, and its weight norm, with ``g = None`` for a plain layer."""

    kind: type[nn.Module]
    known: type[nn.Module]  # that, or fold's version of it with a residual
    v: nn.Parameter
    g: nn.Parameter | None
    dim: int | None


def _candidate(module: nn.Module, plain: bool) -> _Candidate | str | None:
    """How to replace a module; or why it is left alone, in words; or None where it is none of our business."""
    if isinstance(module, (WeightNormalised, PlainResidualBlock)) or name_of_wrapped(module) is not None:
        return None
    old = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, WeightNorm)]
    new = _weight_norms(module)
    known = additions(class_of(module), (*LAYERS, *WITH_RESIDUAL.values()))
    if not old and not new and not (plain and known):
        return None
    if known is None:
        return f"no layer here replaces {class_of(module).__name__}"
    kind, added = next(k for k in LAYERS if issubclass(known[0], k)), known[1]
    if class_of(module) not in (*LAYERS, *WITH_RESIDUAL.values()):
        if isinstance(module, LazyModuleMixin):
            return "it is lazy: run the model once, then convert"
        if class_of(module).__module__.startswith("torch."):
            return f"{class_of(module).__name__} is torch's own subclass of {kind.__name__}"
        if added:
            return f"{class_of(module).__name__} is a subclass of {kind.__name__} with its own {', '.join(added)}"
    if "_compiled_call_impl" in module.__dict__:
        return "it was compiled by itself; convert first, compile then"
    names = (*own_attributes(module), *module._modules, *static_methods(module, known[0]))
    clash = [n for n in names if n in OPTIONS or hasattr(LAYERS[kind], n)]
    clash = [n for n in clash if n not in ("weight", "parametrizations") and not _holds_activation(module, n)]
    if clash:
        return f"its own attribute {clash[0]!r} means something else here"
    others = sorted({h.name for h in old} | set(new)) if old or new else []
    if others not in ([], ["weight"]):
        return f"its weight norm is on {', '.join(repr(n) for n in others if n != 'weight')}"
    return _stored(module, kind, known[0], old, new)


def _weight_norms(module: nn.Module) -> list[str]:
    """The names of the tensors that torch's parametrised weight norm computes, alone or among others."""
    if not parametrize.is_parametrized(module):
        return []
    lists = cast(nn.ModuleDict, module.parametrizations)
    return [n for n, steps in lists.items() if any(isinstance(s, _WeightNorm) for s in cast(nn.ModuleList, steps))]


def _stored(
    module: nn.Module, kind: type[nn.Module], known: type[nn.Module], old: list[WeightNorm], new: list[str]
) -> _Candidate | str:
    """The parameters behind ``weight``, if nothing but torch's weight norm stands between."""
    dim: int | None = 0
    v, g = module._parameters.get("weight"), None
    lists = dict(cast(nn.ModuleDict, module.parametrizations)) if parametrize.is_parametrized(module) else {}
    if old:
        v, g, dim = module._parameters.get("weight_v"), module._parameters.get("weight_g"), norm_dim(old[0].dim)
    elif new:
        steps = cast(nn.ModuleList, lists.pop("weight"))
        if len(steps) != 1:
            return f"its weight is parametrised by {', '.join(type(step).__name__ for step in steps)}"
        v, g = steps.original1, steps.original0  # type: ignore[assignment]
        dim = norm_dim(cast(_WeightNorm, steps[0]).dim)
    if lists:
        return f"its {', '.join(lists)} is parametrised"
    tensors = [v, module._parameters.get("bias")] if g is None and not old else [v, g, module._parameters.get("bias")]
    if "bias" not in module._parameters or v is None or (old and g is None):
        return "its weight or bias is computed by something else"
    for tensor in tensors:
        if tensor is not None and type(tensor) is not nn.Parameter:
            return f"its parameters are of type {type(tensor).__name__}"
        if tensor is not None and not tensor.is_floating_point():
            return f"its parameters are {tensor.dtype}"
        if tensor is not None and tensor.layout is not torch.strided:
            return f"its parameters are {tensor.layout}"
    return _Candidate(kind, known, v, g, dim)


def _holds_activation(module: nn.Module, name: str) -> bool:
    """Whether ``name`` is the child that ``wnfused.fold`` made of a fused activation."""
    return name == "activation" and apply_activation in module._forward_hooks.values()


def _leave_tied_to_others(model: nn.Module, candidates: dict[nn.Module, _Candidate]) -> None:
    """A plain weight that is also held by a module that stays cannot become ``v``: the two would part ways."""
    held = holders(model)
    names = {module: name for name, module in named(model)}
    kept_in = _memory_of([module for module in model.modules() if module not in candidates])
    for module, name in names.items():
        candidate = candidates.get(module)
        if candidate is None or candidate.g is not None:
            continue
        others = held[id(candidate.v)].union(*(kept_in[at] for at in _memory(candidate.v) & kept_in.keys()))
        staying = sorted(names[m] for m in others if m not in candidates)
        if staying:
            logger.warning("%s: left alone, its weight is tied to that of %s, which stays", name, ", ".join(staying))
            del candidates[module]


def _memory_of(modules: list[nn.Module]) -> dict[int, set[nn.Module]]:
    """For each address at which a parameter of these begins, the modules that hold it."""
    found: dict[int, set[nn.Module]] = {}
    for module in modules:
        for parameter in module._parameters.values():
            for address in _memory(parameter):
                found.setdefault(address, set()).add(module)
    return found


def _memory(parameter: nn.Parameter | None) -> set[int]:
    """The address at which it begins; none where there is none to speak of."""
    if type(parameter) is not nn.Parameter or parameter.is_meta or torch._C._len_torch_dispatch_stack():
        return set()
    return {parameter.data_ptr()} if parameter.layout is torch.strided and parameter.numel() else set()


def _leave_without_a_norm(model: nn.Module, candidates: dict[nn.Module, _Candidate]) -> None:
    """Plain weights whose rows are too long for a float32: their gains would be infinite."""
    if torch._C._len_torch_dispatch_stack():  # numbers that nobody may read
        return
    for name, module in named(model):
        candidate = candidates.get(module)
        if candidate is None or candidate.g is not None or candidate.v.is_meta:
            continue
        if not row_norm(candidate.v).isfinite().all() and candidate.v.isfinite().all():
            logger.warning("%s: left alone, its weight has rows whose norm is infinite in float32", name)
            del candidates[module]


# ----------------------------------------------------------------------------------------------------- replacement


def _weight_normalised(
    module: nn.Module, found: _Candidate, gains: dict[tuple[int, int | None], nn.Parameter]
) -> WeightNormalised:
    """A layer of this package around the module's own parameters; tied weights get one gain between them."""
    v, g = found.v, found.g
    if g is None:
        g = gains.setdefault((id(v), found.dim), _gain_of(v))
        _give_directions(v, g)
    bias = module._parameters["bias"]
    stays = {"weight", "weight_v", "weight_g", "bias", "parametrizations"}
    layer = cast(WeightNormalised, twin(module, LAYERS[found.kind], known=found.known, without=stays))
    layer.__dict__.update(activation=None, negative_slope=0.01, gamma=None, init="orthogonal", dim=found.dim)
    layer._converted = not isinstance(module, tuple(WITH_RESIDUAL.values()))
    others = dict(layer._parameters)
    layer._parameters.clear()
    layer._parameters.update(bias=bias, weight_g=g, weight_v=v, **others)
    move_hooks(module, layer)
    activation = detach_activation(layer)
    if activation is not None:
        _set_activation(layer, activation)
    return layer


def _gain_of(w: nn.Parameter) -> nn.Parameter:
    """``||w_i||``, so that the effective weight is ``w``."""
    with torch.inference_mode(False):  # or it could never be trained
        norm = row_norm(w).to(w.dtype).reshape([-1] + [1] * (w.dim() - 1))
        return nn.Parameter(norm, requires_grad=w.requires_grad)


@torch.no_grad()
def _give_directions(v: nn.Parameter, g: Tensor) -> None:
    """Rows of zeros would never train again: they get a direction each, at ``g = 0``.

    In memory of their own, as others may hold the weight's: a state dict, or a parameter that was given it. Processes
    that share it go on sharing it.
    """
    directions = v if v.is_inference() else with_directions(v, g)
    if directions is v:
        return
    if v.device.type == "cpu" and v.is_shared():
        v.copy_(directions)
    else:
        v.data = directions


def _set_activation(layer: WeightNormalised, activation: nn.Module) -> None:
    layer.activation, layer.negative_slope = "relu", 0.01
    if isinstance(activation, nn.LeakyReLU):
        layer.activation, layer.negative_slope = "leaky_relu", activation.negative_slope

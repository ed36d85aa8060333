"""What one symbolic run of a model tells: which activation belongs to which layer, who is given a residual."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from wnfused._surgery import LAYERS, class_of, has_hooks
from wnfused.nn import WeightNormalised, WNResidualBlock, WNResidualStage

_BLOCKS = (WNResidualBlock, WNResidualStage)


class _LayerTracer(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        return isinstance(module, (*LAYERS, *_BLOCKS)) or super().is_leaf_module(module, qualified_name)


def calls(model: nn.Module, logger: logging.Logger, wanted: str) -> dict[nn.Module, list[fx.Node]]:
    """Every call of a submodule that a trace sees; empty where the model does not trace, which is logged.

    Args:
        wanted: what cannot be done without a trace, for the log.
    """
    try:
        with warnings.catch_warnings(), _untouched(model):
            warnings.simplefilter("ignore")
            graph = _LayerTracer().trace(model)
    except Exception as reason:  # a trace runs the user's own code, which may raise anything
        logger.info("%s: the model does not trace (%s)", wanted, reason)
        return {}
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    found: dict[nn.Module, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            found.setdefault(modules[str(node.target)], []).append(node)
    return found


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """What a ``forward`` does beside computing is undone: attributes it sets, lists it fills, numbers it draws."""
    tables = ("_parameters", "_buffers", "_modules")
    before = [(m, dict(m.__dict__), {t: dict(m.__dict__[t]) for t in tables}) for m in model.modules()]
    contents = [
        (value, value.copy())
        for _, attributes, _ in before
        for value in attributes.values()
        if type(value) in (list, dict, set)
    ]
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(state)
            for container, content in contents:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)
            for module, attributes, kept in before:
                module.__dict__.clear()
                module.__dict__.update(attributes)
                for table, entries in kept.items():
                    module.__dict__[table].clear()
                    module.__dict__[table].update(entries)


def fusable_activations(model: nn.Module, logger: logging.Logger) -> dict[nn.Module, nn.Module]:
    """Each layer whose only use is the activation module next to it in an ``nn.Sequential``; empty without a trace.

    One trace shows one way through a model. Neighbours in a sequence are a pair in all of them; a layer and an
    activation that a ``forward`` calls one by one may part ways under a flag, in evaluation, or in another method.
    """
    neighbours = {
        (before, after)
        for sequence in model.modules()
        if isinstance(sequence, nn.Sequential) and type(sequence).forward is nn.Sequential.forward
        for before, after in itertools.pairwise(sequence)
        if class_of(before) in LAYERS and _is_fusable(after)
    }
    if not neighbours:
        return {}
    seen = calls(model, logger, "activations are not fused")
    found: dict[nn.Module, nn.Module] = {}
    for layer, activation in neighbours:
        uses = seen.get(layer, []), seen.get(activation, [])
        if len(uses[0]) != 1 or len(uses[1]) != 1 or has_hooks(layer) or has_hooks(activation):
            continue
        (call,), (next_call,) = uses
        if list(call.users) == [next_call] and next_call.args[:1] == (call,):
            found[layer] = activation
    return found


def _is_fusable(module: nn.Module) -> bool:
    """A ReLU, or a leaky one whose output's sign is its input's."""
    return type(module) is nn.ReLU or (type(module) is nn.LeakyReLU and module.negative_slope >= 0)


def given_a_residual(model: nn.Module, logger: logging.Logger) -> set[nn.Module]:
    """The weight-normalised layers of user-defined modules that a trace sees called with ``residual``."""
    parents = [m for m in model.modules() if not type(m).__module__.startswith(("torch.", "wnfused.nn"))]
    if not any(isinstance(child, WeightNormalised) for parent in parents for child in _inside(parent)):
        return set()
    seen = calls(model, logger, "a layer that is called with a residual cannot be told")
    return {
        layer
        for layer, nodes in seen.items()
        if isinstance(layer, WeightNormalised) and any(_residual(layer, node) is not None for node in nodes)
    }


def _inside(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that a module's own ``forward`` may call: not those of our blocks."""
    for child in module.children():
        yield child
        if isinstance(child, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            yield from _inside(child)


def _residual(layer: nn.Module, node: fx.Node) -> Any:
    position = 2 if isinstance(layer, nn.modules.conv._ConvTransposeNd) else 1
    return node.kwargs.get("residual", node.args[position] if len(node.args) > position else None)

"""What one symbolic run of a model tells: which activation belongs to which layer, who is given a residual."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from wnfused._modules import class_of
from wnfused._surgery import LAYERS, has_hooks
from wnfused._symbolic import WRITES, NotRestoredError, argument, symbolic_run
from wnfused.nn import WeightNormalised, WNResidualBlock, WNResidualStage

_LEAVES = (*LAYERS, WNResidualBlock, WNResidualStage)


@dataclass(frozen=True)
class Look:
    """What one symbolic run showed.

    Attributes:
        calls: every call of a submodule.
        steps: what is called, with what, and what is returned; the same of two models whose ``forward`` goes one way.
            Parameters, other tensors of the model's own, and what is made of these alone count as one.
    """

    calls: dict[nn.Module, list[fx.Node]]
    steps: list[tuple[object, ...]]


def look(
    model: nn.Module, logger: logging.Logger, wanted: str, training: bool | None = None, level: int = logging.INFO,
    leaves: tuple[type[nn.Module], ...] = (),
) -> Look | None:  # fmt: skip
    """None where the model allows no symbolic run, which is logged.

    Args:
        wanted: what cannot be done without a trace, for the log.
        training: the mode of the run; None for the model's own.
        level: of that log.
        leaves: modules of these classes are not looked into.
    """
    try:
        graph = symbolic_run(model, (*_LEAVES, *leaves), training)
    except NotRestoredError:
        raise
    except Exception as reason:  # the run is of the user's own code, which may raise anything
        logger.log(level, "%s: the model does not trace (%s)", wanted, reason)
        return None
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    found: dict[nn.Module, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            found.setdefault(modules[str(node.target)], []).append(node)
    return Look(found, _steps(graph))


def looks(
    model: nn.Module, logger: logging.Logger, wanted: str, level: int = logging.INFO,
    leaves: tuple[type[nn.Module], ...] = (),
) -> list[Look]:  # fmt: skip
    """In training and in evaluation; empty where one of them does not trace: it may do anything."""
    found: list[Look] = []
    for training in (True, False):
        one = look(model, logger, wanted, training, level, leaves)
        if one is None:
            return []
        found.append(one)
    return found


def _steps(graph: fx.Graph) -> list[tuple[object, ...]]:
    steps: list[tuple[object, ...]] = []
    places: dict[fx.Node, int] = {}

    def seen(value: Any) -> object:
        if isinstance(value, fx.Node):
            return places.get(value)
        if isinstance(value, (tuple, list)):
            return [seen(part) for part in value]
        if isinstance(value, dict):
            return [(key, seen(part)) for key, part in value.items()]
        if isinstance(value, slice):
            return ["slice", seen(value.start), seen(value.stop), seen(value.step)]
        return repr(value) if isinstance(value, _COMPARED) else type(value)

    for node in graph.nodes:
        inputs = node.all_input_nodes
        is_made_of_parameters = (
            node.op in ("call_function", "call_method") and inputs and not any(n in places for n in inputs)
        )
        if node.op != "get_attr" and not is_made_of_parameters:
            steps.append((node.op, node.target, seen(node.args), seen(node.kwargs)))
            places[node] = len(steps)
    return steps


_COMPARED = (bool, int, float, complex, str, torch.dtype, torch.device)


def neighbours(model: nn.Module) -> set[tuple[nn.Module, nn.Module]]:
    """Layers and the activation modules next to them in an ``nn.Sequential``, neither of them with hooks."""
    return {
        (before, after)
        for sequence in model.modules()
        if isinstance(sequence, nn.Sequential) and type(sequence).forward is nn.Sequential.forward
        for before, after in itertools.pairwise(sequence)
        if class_of(before) in LAYERS and _is_fusable(after) and not has_hooks(before) and not has_hooks(after)
    }


def fusable_activations(pairs: set[tuple[nn.Module, nn.Module]], runs: list[Look]) -> dict[nn.Module, nn.Module]:
    """Of neighbours, each layer whose only use is the activation; none without a look.

    One trace shows one way through a model. Neighbours in a sequence are a pair in nearly all of them; a layer and an
    activation that a ``forward`` calls one by one may part ways under a flag, or in another method. That the two stay
    together is asked for in training and in evaluation.
    """
    seen = [run.calls for run in runs]
    return {layer: activation for layer, activation in pairs if seen and _stay_together(layer, activation, seen)}


def _stay_together(layer: nn.Module, activation: nn.Module, runs: list[dict[nn.Module, list[fx.Node]]]) -> bool:
    """Called once each, and for each other alone: in every run that calls one of them, and there is one."""
    uses = [(run.get(layer, []), run.get(activation, [])) for run in runs]
    pairs = [pair for pair in uses if any(pair)]
    return (
        bool(pairs)
        and all(
            len(pair[0]) == len(pair[1]) == 1
            and list(pair[0][0].users) == [pair[1][0]]
            and pair[1][0].args[:1] == (pair[0][0],)
            for pair in pairs
        )
        and not (_bears_writes(activation) and any(_is_written(activation, run) for run in runs))
    )


def _bears_writes(activation: nn.Module) -> bool:
    """Whether its backward does without its result, as that of a fused layer does not."""
    return isinstance(activation, nn.LeakyReLU) and not activation.inplace


def _is_written(module: nn.Module, run: dict[nn.Module, list[fx.Node]]) -> bool:
    """Whether a later step changes a module's result, or a view of it, in place."""
    in_place = {node for other, nodes in run.items() if getattr(other, "inplace", False) for node in nodes}
    views = {node for other, nodes in run.items() if isinstance(other, _MAY_GIVE_A_VIEW) for node in nodes}
    pending = list(run.get(module, []))
    while pending:
        node = pending.pop()
        for user in node.users:
            if user.args[:1] == (node,) and (user in in_place or _is_in_place(user)):
                return True
            if user in views or _name(user) in _VIEWS:
                pending.append(user)
    return False


_MAY_GIVE_A_VIEW = (nn.Flatten, nn.Identity, nn.Unflatten, nn.modules.dropout._DropoutNd)
_VIEWS = {
    "chunk", "contiguous", "detach", "dropout", "expand", "flatten", "getitem", "movedim", "narrow", "permute",
    "reshape", "select", "split", "squeeze", "swapaxes", "t", "to", "transpose", "unbind", "unflatten", "unsqueeze",
    "view", "view_as",
}  # fmt: skip


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")


def _is_in_place(node: fx.Node) -> bool:
    return bool(node.meta.get(WRITES)) or _name(node).endswith("_") or bool(node.kwargs.get("inplace"))


def _is_fusable(module: nn.Module | None) -> bool:
    """A ReLU, or a leaky one whose output's sign is its input's; called by no method of the user's."""
    if module is None or "forward" in vars(module):
        return False
    return type(module) is nn.ReLU or (type(module) is nn.LeakyReLU and 0 <= module.negative_slope < math.inf)


def given_a_residual(model: nn.Module, logger: logging.Logger) -> set[nn.Module]:
    """The weight-normalised layers of user-defined modules that a trace sees called with ``residual``."""
    parents = [m for m in model.modules() if not type(m).__module__.startswith(("torch.", "wnfused.nn"))]
    layers = [child for parent in parents for child in _inside(parent) if isinstance(child, WeightNormalised)]
    if not layers:
        return set()
    # Such a layer fails at its next call, far from here.
    lost = "a layer that is called with a residual takes none any more; whether one is could not be seen"
    level = logging.INFO if all(layer._converted for layer in layers) else logging.WARNING
    seen = look(model, logger, lost, level=level)
    return {
        layer
        for layer, nodes in (seen.calls.items() if seen else ())
        if isinstance(layer, WeightNormalised)
        and any(argument(node, "residual", layer.residual_position) is not None for node in nodes)
    }


def _inside(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that a module's own ``forward`` may call: not those of our blocks."""
    for child in module.children():
        yield child
        if isinstance(child, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            yield from _inside(child)

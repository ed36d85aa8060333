"""Where each layer stands in a model: before a ReLU, at the end of a residual branch, or neither.

Found by tracing the model with ``torch.fx``. A layer *precedes an activation* if its output reaches one through
nothing but layers that keep the statistics up to scale (batch norm, dropout, pooling, reshaping). A layer *closes a
branch* if its output is added to something that it was itself computed from; blocks that follow one another
through identity shortcuts make a stage, and a shortcut with layers of its own opens a new one. A model that does
not trace is read by its structure: the neighbours in every ``nn.Sequential`` and this package's own blocks.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from wnfused.init.layer import activation_gamma
from wnfused.nn import PlainResidualBlock, WeightNormalised, WNResidualBlock, WNResidualStage

PLAIN_LAYERS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


@dataclass(frozen=True)
class Role:
    """One layer's place.

    Attributes:
        name: the module's path in the model.
        layer: the module: a layer, weight-normalised or plain, or a :class:`wnfused.WNResidualStage`.
        activation_gamma: 2 before a ReLU, ``2 / (1 + slope^2)`` before a leaky one, 1 otherwise.
        closes_branch: whether it is the last layer of a residual branch.
        num_blocks: ``B_k``, how many blocks its stage has; 1 outside a residual stage.
        block: which block of its stage it is in, from 1; 0 outside.
        placed: False where neither trace nor structure tells, and the role is only assumed.
    """

    name: str
    layer: nn.Module
    activation_gamma: float = 1.0
    closes_branch: bool = False
    num_blocks: int = 1
    block: int = 0
    placed: bool = True

    @property
    def gamma(self) -> float:
        """The factor of the gain: ``activation_gamma / B_k`` where the layer closes a branch."""
        return self.activation_gamma / (self.num_blocks if self.closes_branch else 1)


def is_layer(module: nn.Module) -> bool:
    return isinstance(module, (WeightNormalised, WNResidualStage, *PLAIN_LAYERS))


def find_roles(model: nn.Module) -> list[Role]:
    """The role of every layer of the model, in order of execution where the model traces."""
    try:
        graph = _Tracer().trace(model)
    except Exception as reason:  # a trace runs the user's own code, which may raise anything
        return _roles_by_structure(model, reason)
    return _roles_by_graph(model, graph)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        return is_layer(module) or super().is_leaf_module(module, qualified_name)


# ------------------------------------------------------------------------------------------------- by graph

_ADDS = {operator.add, operator.iadd, torch.add}
_TRANSPARENT_MODULES = (
    nn.Identity, nn.Flatten, nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd,
    nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm,
)  # fmt: skip
_TRANSPARENT_CALLS = {
    "flatten", "view", "reshape", "contiguous", "mean", "dropout", "max_pool1d", "max_pool2d", "max_pool3d",
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "permute",
    "transpose", "mul", "unsqueeze", "squeeze",
}  # fmt: skip


def _call_name(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


class _Graph:
    """The questions that the roles are made of."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        self.modules = dict(model.named_modules())
        self.nodes = list(graph.nodes)

    def module(self, node: fx.Node) -> nn.Module | None:
        return self.modules[str(node.target)] if node.op == "call_module" else None

    def is_layer(self, node: fx.Node) -> bool:
        module = self.module(node)
        return module is not None and is_layer(module)

    def activation(self, node: fx.Node) -> float | None:
        """gamma of an activation node, None if it is none."""
        module = self.module(node)
        if isinstance(module, nn.ReLU) or _call_name(node) in ("relu", "relu_"):
            return activation_gamma("relu", 0.0)
        if isinstance(module, nn.LeakyReLU):
            return activation_gamma("leaky_relu", module.negative_slope)
        if _call_name(node) in ("leaky_relu", "leaky_relu_"):
            slope = node.args[1] if len(node.args) > 1 else node.kwargs.get("negative_slope", 0.01)
            return activation_gamma("leaky_relu", slope) if isinstance(slope, (int, float)) else None
        return None

    def is_transparent(self, node: fx.Node) -> bool:
        return isinstance(self.module(node), _TRANSPARENT_MODULES) or _call_name(node) in _TRANSPARENT_CALLS

    def addends(self, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """The two nodes that are summed here: by an addition, or by a layer with a residual (itself counts)."""
        if self.is_layer(node):
            residual = node.args[1] if len(node.args) > 1 else node.kwargs.get("residual")
            return (node, residual) if isinstance(residual, fx.Node) else None
        adds = (node.op == "call_function" and node.target in _ADDS) or _call_name(node) in ("add", "add_")
        summed = [a for a in node.args[:2] if isinstance(a, fx.Node)]
        return (summed[0], summed[1]) if adds and len(summed) == 2 else None

    def following_gamma(self, node: fx.Node) -> float:
        """gamma that the activation after ``node`` asks for; 1 unless every use of it is that activation."""
        found = set()
        for user in node.users:
            gamma = self.activation(user)
            if gamma is None:
                gamma = self.following_gamma(user) if self.is_transparent(user) else 1.0
            found.add(gamma)
        return found.pop() if len(found) == 1 else 1.0

    def spine(self, node: fx.Node) -> Iterator[fx.Node]:
        """``node`` and what it was computed from, first argument by first argument."""
        current: Any = node
        while isinstance(current, fx.Node):
            yield current
            current = next((a for a in current.args if isinstance(a, fx.Node)), None)


@dataclass
class _Block:
    """A residual block in the graph: where it ends, what closes its branch, and whether its shortcut has layers."""

    sum: fx.Node
    fork: fx.Node
    closing: fx.Node
    projects: bool


def _residual_block(graph: _Graph, node: fx.Node) -> _Block | None:
    """The block that ends in ``node``, if two paths from one fork are summed here and one of them has layers."""
    addends = graph.addends(node)
    if addends is None:
        return None
    paths = _paths_to_fork(graph, *addends)
    if paths is None:
        return None
    fork = paths[0][-1]
    layers = [[n for n in path[:-1] if graph.is_layer(n)] for path in paths]
    branch = 0 if len(layers[0]) >= len(layers[1]) else 1
    if not layers[branch]:
        return None
    return _Block(node, fork, layers[branch][0], bool(layers[1 - branch]))


def _paths_to_fork(graph: _Graph, a: fx.Node, b: fx.Node) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """The spines of two nodes up to the first node they share, walked in step so that depth costs nothing."""
    walks = graph.spine(a), graph.spine(b)
    paths: tuple[dict[fx.Node, None], dict[fx.Node, None]] = ({}, {})
    for steps in itertools.zip_longest(*walks):
        for mine, step in enumerate(steps):
            if step is None:
                continue
            paths[mine][step] = None
            if step in paths[1 - mine]:
                ordered = [list(path) for path in paths]
                first, second = (path[: path.index(step) + 1] for path in ordered)
                return first, second
    return None


def _stages(graph: _Graph) -> Iterator[list[_Block]]:
    """Blocks that follow one another through identity shortcuts."""
    stage: list[_Block] = []
    for node in graph.nodes:
        block = _residual_block(graph, node)
        if block is None:
            continue
        continues = False
        if stage and not block.projects:
            between = graph.spine(block.fork)
            for n in between:
                if n is stage[-1].sum:
                    continues = True
                if n is stage[-1].sum or graph.is_layer(n):
                    break
        if stage and not continues:
            yield stage
            stage = []
        stage.append(block)
    if stage:
        yield stage


def _roles_by_graph(model: nn.Module, traced: fx.Graph) -> list[Role]:
    graph = _Graph(model, traced)
    closing = {
        block.closing: (position, len(stage))
        for stage in _stages(graph)
        for position, block in enumerate(stage, start=1)
    }
    roles: dict[str, Role] = {}
    for node in graph.nodes:
        if not graph.is_layer(node):
            continue
        name, layer = str(node.target), graph.modules[str(node.target)]
        gamma = _fused_gamma(layer)
        if gamma == 1.0:
            gamma = graph.following_gamma(node)
        role = Role(name, layer, gamma)
        if node in closing:
            # An activation after the sum belongs to the stream, not to the branch.
            before_sum = gamma if _activated_before_sum(graph, node) else _fused_gamma(layer)
            block, count = closing[node]
            role = replace(role, activation_gamma=before_sum, closes_branch=True, num_blocks=count, block=block)
        roles.setdefault(name, role)
    for name, module in model.named_modules():  # layers that the trace never called
        if is_layer(module) and name not in roles and not _inside_stage(name, model):
            roles[name] = Role(name, module, _fused_gamma(module), placed=False)
    return list(roles.values())


def _activated_before_sum(graph: _Graph, node: fx.Node) -> bool:
    return any(graph.activation(user) is not None for user in node.users)


def _inside_stage(name: str, model: nn.Module) -> bool:
    parts = name.split(".")
    ancestors = (".".join(parts[:i]) for i in range(1, len(parts)))
    return any(isinstance(model.get_submodule(a), WNResidualStage) for a in ancestors)


def _fused_gamma(layer: nn.Module) -> float:
    if isinstance(layer, WeightNormalised):
        return activation_gamma(layer.activation, layer.negative_slope)
    return 1.0


# --------------------------------------------------------------------------------------------- by structure


def _roles_by_structure(model: nn.Module, reason: Exception) -> list[Role]:
    """This package's blocks, and neighbours in ``nn.Sequential``; every other layer counts as not placed."""
    roles: dict[str, Role] = {}

    def place(name: str, layer: nn.Module, **place: Any) -> None:
        roles[name] = Role(name, layer, **{"activation_gamma": _fused_gamma(layer), **place})

    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, (WNResidualBlock, PlainResidualBlock)):
            place(f"{prefix}conv1", module.conv1, activation_gamma=2.0)
            count = module.num_blocks if isinstance(module, WNResidualBlock) else 1
            place(f"{prefix}conv2", module.conv2, closes_branch=True, num_blocks=count, block=1)
            if is_layer(module.shortcut):
                place(f"{prefix}shortcut", module.shortcut)
        elif isinstance(module, nn.Sequential):
            children = list(module.named_children())
            following: list[nn.Module | None] = [child for _, child in children[1:]] + [None]
            for (child_name, child), after in zip(children, following, strict=True):
                gamma = _fused_gamma(child)
                if isinstance(after, nn.ReLU):
                    gamma = 2.0
                elif isinstance(after, nn.LeakyReLU):
                    gamma = activation_gamma("leaky_relu", after.negative_slope)
                if is_layer(child) and after is not None and f"{prefix}{child_name}" not in roles:
                    place(f"{prefix}{child_name}", child, activation_gamma=gamma)
    for name, module in model.named_modules():
        if is_layer(module) and name not in roles and not _inside_stage(name, model):
            known = isinstance(module, WNResidualStage) or _fused_gamma(module) != 1.0
            place(name, module, placed=known)
    return list(roles.values())

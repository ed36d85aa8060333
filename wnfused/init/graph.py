"""What a trace of a model by ``torch.fx`` says about its layers: what follows them, and which residual branch they are
in.

A layer *precedes an activation* if its output reaches one through nothing but layers that keep the statistics up to
scale (norms, dropout, pooling, resizing, padding, reshaping, casts, factors). A layer *closes a branch* if its output
is added to something that it was itself computed from; blocks that follow one another through identity shortcuts make a
stage, and a shortcut with layers of its own opens a new one.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from wnfused._symbolic import argument, symbolic_run
from wnfused.nn import WeightNormalised, WNResidualStage
from wnfused.nn._rule import activation_gamma
from wnfused.nn.plain import WITH_RESIDUAL

_LAYERS = (WeightNormalised, WNResidualStage, *WITH_RESIDUAL)


def is_layer(module: nn.Module) -> bool:
    return isinstance(module, _LAYERS)


class Activation(NamedTuple):
    """What a layer is followed by: the gamma that it asks for, and the name of one for which there is none."""

    gamma: float = 1.0
    without_gamma: str = ""


_NOTHING = Activation()
# Pre-activations far below 6 never meet the upper bound of ReLU6, so that it is a ReLU to them.
_RELUS = (nn.ReLU, nn.ReLU6)
_RELU_CALLS = ("relu", "relu_", "relu6")
_CLAMPS = ("clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_min_")
_WITHOUT_GAMMA = (
    nn.CELU, nn.ELU, nn.GELU, nn.GLU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LogSigmoid, nn.Mish,
    nn.PReLU, nn.RReLU, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink,
    nn.Threshold,
)  # fmt: skip
_CALLS_WITHOUT_GAMMA = {kind.__name__.lower(): kind.__name__ for kind in _WITHOUT_GAMMA}
_CALLS_WITHOUT_GAMMA |= {"log_sigmoid": "LogSigmoid", "sin": "sin", "cos": "cos"}
_PRODUCTS = ("mul", "imul", "mul_")


def activation_of_module(module: nn.Module) -> Activation | None:
    """None of a module that is no activation."""
    if isinstance(module, _RELUS) or (isinstance(module, nn.Threshold) and module.threshold == module.value == 0):
        return Activation(activation_gamma("relu", 0.0))
    if isinstance(module, nn.LeakyReLU):
        return Activation(activation_gamma("leaky_relu", module.negative_slope))
    return Activation(without_gamma=type(module).__name__) if isinstance(module, _WITHOUT_GAMMA) else None


_ADDS = {operator.add, operator.iadd, torch.add}
# LPPool is none: it leaves nothing below 0 that a ReLU could drop.
TRANSPARENT_MODULES = (
    nn.Identity,
    nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm,
    nn.modules.dropout._DropoutNd,
    nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.FractionalMaxPool2d, nn.FractionalMaxPool3d,
    nn.Upsample,
    nn.modules.padding._ConstantPadNd, nn.modules.padding._ReflectionPadNd, nn.modules.padding._ReplicationPadNd,
    nn.modules.padding._CircularPadNd,
    nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle,
)  # fmt: skip
_FOR_EACH_RANK = ("dropout", "max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool", "fractional_max_pool")
_TRANSPARENT_CALLS = {
    "batch_norm", "instance_norm", "layer_norm", "group_norm", "rms_norm",
    "dropout", "alpha_dropout", "feature_alpha_dropout",
    *(f"{name}{rank}d" for name in _FOR_EACH_RANK for rank in (1, 2, 3)), "mean",
    "interpolate", "pad",
    "flatten", "unflatten", "view", "reshape", "squeeze", "unsqueeze", "pixel_shuffle", "pixel_unshuffle",
    "channel_shuffle",
    "permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims",
    "contiguous", "to", "float", "double", "half", "bfloat16",
    "mul",
}  # fmt: skip
_QUOTIENTS = ("truediv", "div", "div_", "true_divide")
_FACTS = ("shape", "ndim", "dtype", "device")
_FACT_CALLS = ("size", "dim", "ndimension", "numel")


def _call_name(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def _clamps_at_0(node: fx.Node) -> bool:
    """From below alone, so that it is a ReLU."""
    least = argument(node, "min", 1)
    return type(least) in (int, float) and least == 0 and argument(node, "max", 2) is None


def _puts_0_below_0(node: fx.Node) -> bool:
    """A threshold that is a ReLU."""
    numbers = argument(node, "threshold", 1), argument(node, "value", 2)
    return all(type(number) in (int, float) and number == 0 for number in numbers)


def _is_addition(node: fx.Node) -> bool:
    return (node.op == "call_function" and node.target in _ADDS) or _call_name(node) in ("add", "add_")


def _asks_for_facts(node: fx.Node) -> bool:
    """Not for values, as of a size to reshape to."""
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in _FACTS
    return node.op == "call_method" and node.target in _FACT_CALLS


class Graph:
    """The questions that the roles are made of."""

    def __init__(self, model: nn.Module, training: bool | None = None) -> None:
        graph = symbolic_run(model, _LAYERS, training)
        self.modules = dict(model.named_modules())
        self.nodes = list(graph.nodes)
        self._source: dict[fx.Node, fx.Node | None] = {}
        for node in self.nodes:
            self._source[node] = self._find_source(node)

    def module(self, node: fx.Node) -> nn.Module | None:
        return self.modules[str(node.target)] if node.op == "call_module" else None

    def is_layer(self, node: fx.Node) -> bool:
        module = self.module(node)
        return module is not None and is_layer(module)

    def activation(self, node: fx.Node) -> Activation | None:
        """What an activation node asks for, None if it is none."""
        module = self.module(node)
        if module is not None:
            return activation_of_module(module)
        name = _call_name(node)
        bare = name.strip("_")
        is_relu = name in _RELU_CALLS or (name in _CLAMPS and _clamps_at_0(node))
        if is_relu or (bare == "threshold" and _puts_0_below_0(node)):
            return Activation(activation_gamma("relu", 0.0))
        if name in ("leaky_relu", "leaky_relu_"):
            slope = node.args[1] if len(node.args) > 1 else node.kwargs.get("negative_slope", 0.01)
            return Activation(activation_gamma("leaky_relu", slope)) if isinstance(slope, (int, float)) else None
        other = _CALLS_WITHOUT_GAMMA.get(bare)
        return None if other is None else Activation(without_gamma=other)

    def is_transparent(self, node: fx.Node) -> bool:
        if isinstance(self.module(node), TRANSPARENT_MODULES) or _call_name(node) in _TRANSPARENT_CALLS:
            return True
        # A learned scalar, or a number, added or as the divisor.
        if _call_name(node) in _QUOTIENTS:
            divisor = argument(node, "other", 1)
            return not isinstance(divisor, fx.Node) or divisor.op == "get_attr"
        return _is_addition(node) and self.addends(node) is None

    def addends(self, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """The two nodes that are summed here: by an addition, or by a layer with a residual (itself counts)."""
        if self.is_layer(node):
            position = getattr(self.module(node), "residual_position", None)
            residual = None if position is None else argument(node, "residual", position)
            return (node, residual) if isinstance(residual, fx.Node) else None
        summed = [a for a in node.args[:2] if isinstance(a, fx.Node) and a.op != "get_attr"]
        return (summed[0], summed[1]) if _is_addition(node) and len(summed) == 2 else None

    def following(self, node: fx.Node) -> Activation:
        """The activation after ``node``; nothing unless every use of its values is that activation."""
        product = self._product_with_own_activation(node)
        if product is not None:
            return product
        found = set()
        for user in node.users:
            if _asks_for_facts(user):
                continue
            activation = self.activation(user)
            if activation is None:
                # The weight of a norm, which a layer may compute, is not what passes through it.
                through = self._source[user] is node or _call_name(user) in _PRODUCTS
                activation = self.following(user) if through and self.is_transparent(user) else _NOTHING
            found.add(activation)
        return found.pop() if len(found) == 1 else _NOTHING

    def _product_with_own_activation(self, node: fx.Node) -> Activation | None:
        """``h * f(h)``, as SiLU and Mish are written out."""
        product = next((user for user in node.users if _call_name(user) in _PRODUCTS), None)
        if product is None or len(node.users) != 2:
            return None
        current = next((a for a in product.args[:2] if a is not node), None)
        names: list[str] = []
        while isinstance(current, fx.Node) and current is not node:
            activation, sources = self.activation(current), current.all_input_nodes
            if activation is None or not activation.without_gamma or len(current.users) != 1 or len(sources) != 1:
                return None
            names.append(activation.without_gamma)
            current = sources[0]
        return Activation(without_gamma=f"its product with its own {' of '.join(names)}") if names else None

    def spine(self, node: fx.Node) -> Iterator[fx.Node]:
        """``node`` and what it was computed from, source by source."""
        current: fx.Node | None = node
        while current is not None:
            yield current
            current = self._source[current]

    def _find_source(self, node: fx.Node) -> fx.Node | None:
        """The first argument, in a list too, that is no parameter; of a product the factor that the other one, a gate,
        was computed from, or that goes back to what the product is added to."""
        sources = [a for a in node.all_input_nodes if a.op != "get_attr"]
        if len(sources) == 2 and _call_name(node) in _PRODUCTS:
            paths = _paths_to_fork(self, *sources)
            if paths is not None and paths[0][-1] in sources:
                return paths[0][-1]
            beside = self._added_to(node)
            if beside is not None and paths is None:
                return next((a for a in sources if _paths_to_fork(self, a, beside) is not None), sources[0])
        return next(iter(sources), None)

    def _added_to(self, node: fx.Node) -> fx.Node | None:
        """What is known already of what the only use of a node, an addition, adds to it."""
        while len(node.users) == 1:
            user = next(iter(node.users))
            others = [a for a in user.all_input_nodes if a is not node and a.op != "get_attr"]
            if _is_addition(user) and others:
                return others[0] if others[0] in self._source else None
            if others or self.is_layer(user):
                return None
            node = user
        return None

    def summands(self, node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
        """What is summed here, by this addition and by those that it alone is the sum of; and these."""
        found: list[fx.Node] = []
        inner: list[fx.Node] = []
        waiting = list(reversed(self.addends(node) or ()))
        while waiting:
            summand = waiting.pop()
            before = self._inner_sum(summand)
            if before is None:
                found.append(summand)
            else:
                inner.append(before)
                waiting += reversed(self.addends(before) or ())
        return found, inner

    def _inner_sum(self, node: fx.Node) -> fx.Node | None:
        """An addition that nobody else sees, and that reaches the one after it with its statistics up to scale."""
        current: fx.Node | None = node
        while current is not None and len(current.users) == 1:
            if not self.is_layer(current) and self.addends(current) is not None:
                return current
            current = self._source[current] if self.is_transparent(current) else None
        return None

    def heads(self) -> set[fx.Node]:
        """The layers whose output is the model's, with no layer and no residual sum in between."""
        found: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        waiting = [node for node in self.nodes if node.op == "output"]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if self.is_layer(node):
                found.add(node)
            elif self.addends(node) is None and not _asks_for_facts(node):
                waiting.extend(node.all_input_nodes)
        return found


@dataclass
class ResidualBlock:
    """A residual block in the graph: where it ends and begins, its branch, and the layers of the branch and of the
    shortcut, each from the last to the first; ``beside`` are layers that are summed into the branch."""

    sum: fx.Node
    fork: fx.Node
    branch: list[fx.Node]
    layers: list[fx.Node]
    shortcut: list[fx.Node]
    beside: list[fx.Node] = field(default_factory=list)


def _residual_block(graph: Graph, node: fx.Node) -> ResidualBlock | None:
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
    return ResidualBlock(node, fork, paths[branch][:-1], layers[branch], layers[1 - branch])


def _blocks(graph: Graph) -> list[ResidualBlock]:
    """All of them, in order of execution. Branches side by side, ``x + (f(x) + g(x))``, make one block each; a sum
    inside a branch, ``x + h(f(x) + g(x))``, makes none of its own."""
    sums, parts = _sums_of_several(graph)
    found: dict[fx.Node, list[ResidualBlock]] = {}
    for node in graph.nodes:
        if node in sums:
            found[node] = sums[node]
        elif node not in parts:
            block = _residual_block(graph, node)
            if block is None:
                continue
            if not block.shortcut:
                _absorb(block, found)
            found[node] = [block]
    return [block for blocks in found.values() for block in blocks]


def _sums_of_several(graph: Graph) -> tuple[dict[fx.Node, list[ResidualBlock]], set[fx.Node]]:
    """The blocks of each sum of branches side by side, by its last addition; and the additions before that, which are
    looked at from the last one alone: there may be many of them."""
    sums: dict[fx.Node, list[ResidualBlock]] = {}
    parts: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        summands, inner = ([], []) if node in parts else graph.summands(node)
        blocks = _side_by_side(graph, node, summands) if inner else []
        if blocks:
            sums[node] = blocks
            parts.update(inner)
    return sums, parts


def _absorb(block: ResidualBlock, found: dict[fx.Node, list[ResidualBlock]]) -> None:
    """Take what was found to be a block with layers in its shortcut, but is a sum inside this branch, into it."""
    for node in block.branch:
        inside = found.get(node, [])
        # A shortcut has fewer layers than its branch.
        if inside and all(inner.fork is block.fork and len(inner.shortcut) == len(inner.layers) for inner in inside):
            for inner in found.pop(node):
                block.beside += [n for n in (*inner.layers, *inner.shortcut, *inner.beside) if n not in block.layers]


def _side_by_side(graph: Graph, node: fx.Node, summands: list[fx.Node]) -> list[ResidualBlock]:
    """The blocks of one sum of several branches and a shortcut that begin at one tensor; none if it is no such. The
    shortcut is what has the fewest layers; if it has any, all that is summed must begin there."""
    best: list[ResidualBlock] = []
    for shortcut in summands:
        blocks: list[ResidualBlock] = []
        for other in summands:
            paths = None if other is shortcut else _paths_to_fork(graph, other, shortcut)
            if paths is None:
                continue
            fork, branch = paths[0][-1], paths[0][:-1]
            layers, skipped = ([n for n in path[:-1] if graph.is_layer(n)] for path in paths)
            if layers and (not blocks or fork is blocks[0].fork):
                blocks.append(ResidualBlock(node, fork, branch, layers, skipped))
        usable = blocks and (not blocks[0].shortcut or len(blocks) == len(summands) - 1)
        if usable and (not best or len(blocks[0].shortcut) < len(best[0].shortcut)):
            best = blocks
        if best and not best[0].shortcut:
            break
    return best


def _paths_to_fork(graph: Graph, a: fx.Node, b: fx.Node) -> tuple[list[fx.Node], list[fx.Node]] | None:
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


def _stages(graph: Graph) -> Iterator[list[ResidualBlock]]:
    """Blocks that follow one another through identity shortcuts."""
    stage: list[ResidualBlock] = []
    for block in _blocks(graph):
        continues = bool(stage) and block.sum is stage[-1].sum
        if stage and not block.shortcut and not continues:
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


def places(graph: Graph) -> dict[fx.Node, dict[str, Any]]:
    """What a layer's place in a residual branch says about its role, branches numbered in order of execution."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    found: list[tuple[int, int, Any]] = []
    for stage in _stages(graph):
        found += [(position[block.sum], 1, (block, n, len(stage))) for n, block in enumerate(stage, start=1)]
    for node in graph.nodes:
        module = graph.module(node)
        if isinstance(module, WNResidualStage):
            found.append((position[node], module.num_blocks, node))
    places: dict[fx.Node, dict[str, Any]] = {}
    branches = 0
    for _, count, what in sorted(found, key=lambda f: f[0]):
        if isinstance(what, fx.Node):
            places[what] = {"branch": branches + 1}
        else:
            block, n, blocks = what
            here = {"num_blocks": blocks, "block": n, "branch": branches + 1, "branch_layers": len(block.layers)}
            for layer in (*block.layers, *block.beside):
                places.setdefault(layer, dict(here))
            places[block.layers[0]].update(here, closes_branch=True)
        branches += count
    return places

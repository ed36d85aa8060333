"""Where each layer stands in a model: before a ReLU, at the end of a residual branch, the head, or none of these.

Read off a trace of the model (``wnfused.init.graph``). A model that does not trace is read by its structure: the
neighbours in every ``nn.Sequential``, and the residual blocks of ``wnfused.nn``, which are a stage where they follow
one another in an ``nn.Sequential`` or ``nn.ModuleList``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from wnfused._modules import check_module
from wnfused._symbolic import NotRestoredError
from wnfused.init.graph import TRANSPARENT_MODULES, Activation, Graph, activation_of_module, is_layer, places
from wnfused.nn import FixupBlock, PlainResidualBlock, WeightNormalised, WNResidualBlock, WNResidualStage
from wnfused.nn._rule import activation_gamma

logger = logging.getLogger("wnfused.init")


@dataclass(frozen=True)
class Role:
    """One layer's place.

    Attributes:
        name: the module's path in the model.
        layer: the module: a layer, weight-normalised or plain, or a ``wnfused.WNResidualStage``.
        activation_gamma: 2 before a ReLU (ReLU6 too), ``2 / (1 + slope^2)`` before a leaky one, 1 otherwise.
        closes_branch: whether it is the last layer of a residual branch.
        num_blocks: ``B_k``, how many blocks its stage has; 1 outside a residual stage.
        block: which block of its stage it is in, from 1; 0 outside.
        branch: which residual branch of the model it is in, from 1; 0 outside, and on a shortcut.
        branch_layers: how many layers that branch has, m.
        head: whether the model's output is this layer's, through nothing but layers without weights.
        stated: a gamma that the layer's constructor or the caller stated, which wins over what was found.
        by_hand: whether ``stated`` is the caller's.
        placed: False where neither trace nor structure tells, and the role is only assumed.
        without_gamma: the name of the activation after it, where that is one for which the schemes have no gamma, such
            as GELU; empty otherwise.
    """

    name: str
    layer: nn.Module
    activation_gamma: float = 1.0
    closes_branch: bool = False
    num_blocks: int = 1
    block: int = 0
    branch: int = 0
    branch_layers: int = 0
    head: bool = False
    stated: float | None = None
    by_hand: bool = False
    placed: bool = True
    without_gamma: str = ""

    @property
    def gamma(self) -> float:
        """The factor of the gain: the stated one, or ``activation_gamma``, over ``B_k`` if it closes a branch."""
        if self.stated is not None:
            return self.stated
        return self.activation_gamma / (self.num_blocks if self.closes_branch else 1)

    def parts(self) -> Iterator[Role]:
        """The roles inside a stage, in order of execution; its stacked convolutions share the stage as their layer.

        ``block`` and ``branch`` of the stacked ones are those of the first identity block.
        """
        stage = self.layer
        assert isinstance(stage, WNResidualStage)
        transition = stage.transition
        inside: dict[str, Any] = {"num_blocks": stage.num_blocks, "branch_layers": 2}
        if transition is not None:
            path = f"{self.name}.transition" if self.name else "transition"
            here = {**inside, "block": 1, "branch": self.branch}
            yield Role(f"{path}.conv1", transition.conv1, activation_gamma=2.0, **here)
            yield Role(f"{path}.shortcut", transition.shortcut)
            yield Role(f"{path}.conv2", transition.conv2, closes_branch=True, **here)
        after = 0 if transition is None else 1
        here = {**inside, "block": 1 + after, "branch": self.branch + after}
        path = f"{self.name}.weight_v" if self.name else "weight_v"
        if len(stage.weight_v):
            yield Role(f"{path}[:, 0]", stage, activation_gamma=2.0, **here)
            yield Role(f"{path}[:, 1]", stage, closes_branch=True, **here)


def find_roles(model: nn.Module) -> list[Role]:
    """The role of every layer of the model, in order of execution where the model traces.

    What a constructor states goes before what is found: a layer's ``gamma``, and ``num_blocks`` of a
    ``wnfused.WNResidualBlock`` where it is more than 1. (The gammas that such a block gives its own layers follow
    from its ``num_blocks``, so they are none of the user's.)

    Raises:
        TypeError: ``model`` is not a module.
    """
    return roles_and_trouble(model)[0]


def roles_and_trouble(model: nn.Module) -> tuple[list[Role], str]:
    """``find_roles``, and in a line why the model does not trace; empty if it does."""
    check_module(model=model)
    trouble = ""
    try:
        graph = _graph(model)
    except NotRestoredError:
        raise
    except Exception as reason:  # a trace runs the user's own code, which may raise anything
        logger.info("the model does not trace, roles are read off its structure: %s", reason)
        trouble = str(reason).partition("\n")[0].rstrip(".") or type(reason).__name__
        roles = _roles_by_structure(model)
    else:
        roles = _roles_by_graph(model, graph)
    blocks = {
        id(layer): module for module in model.modules() if isinstance(module, WNResidualBlock)
        for layer in module.children()
    }  # fmt: skip
    return [_with_what_is_stated(role, blocks.get(id(role.layer))) for role in roles], trouble


def _graph(model: nn.Module) -> Graph:
    """Of the mode that the model is in; if that depends on numbers, as stochastic depth does, of evaluation."""
    try:
        return Graph(model)
    except NotRestoredError:
        raise
    except Exception as reason:
        if not any(module.training for module in model.modules()):
            raise
        try:
            return Graph(model, training=False)
        except NotRestoredError:
            raise
        except Exception:
            raise reason from None


def _with_what_is_stated(role: Role, block: WNResidualBlock | None) -> Role:
    if block is not None:
        return replace(role, num_blocks=block.num_blocks) if block.num_blocks > 1 and role.branch else role
    if isinstance(role.layer, WeightNormalised) and role.layer.gamma is not None:
        return replace(role, stated=role.layer.gamma, placed=True)
    return role


# ------------------------------------------------------------------------------------------------- by graph


def _roles_by_graph(model: nn.Module, graph: Graph) -> list[Role]:
    found = places(graph)
    heads = graph.heads()
    roles: dict[str, Role] = {}
    for node in graph.nodes:
        if not graph.is_layer(node):
            continue
        name, layer = str(node.target), graph.modules[str(node.target)]
        after = _with_fused(layer, graph.following(node))
        place = found.get(node, {})
        if place.get("closes_branch") and not _activated_before_sum(graph, node):
            # An activation after the sum belongs to the stream, not to the branch.
            after = Activation(_fused_gamma(layer))
        head = node in heads and not place and after.gamma == 1.0
        roles.setdefault(name, Role(name, layer, after.gamma, head=head, without_gamma=after.without_gamma, **place))
    for name, module in model.named_modules():  # layers that the trace never called
        if is_layer(module) and name not in roles and not _inside_stage(name, model):
            roles[name] = Role(name, module, _fused_gamma(module), placed=False)
    return list(roles.values())


def _activated_before_sum(graph: Graph, node: fx.Node) -> bool:
    return any(graph.activation(user) is not None for user in node.users)


def _inside_stage(name: str, model: nn.Module) -> bool:
    parts = name.split(".")
    ancestors = (".".join(parts[:i]) for i in range(1, len(parts)))
    return any(isinstance(model.get_submodule(a), WNResidualStage) for a in ancestors)


def _with_fused(layer: nn.Module, after: Activation) -> Activation:
    """What follows a layer, or the activation that it applies itself."""
    fused = _fused_gamma(layer)
    return after if fused == 1.0 else Activation(fused)


def _fused_gamma(layer: nn.Module) -> float:
    if isinstance(layer, WeightNormalised):
        return activation_gamma(layer.activation, layer.negative_slope)
    return 1.0


# --------------------------------------------------------------------------------------------- by structure


_BLOCKS = (WNResidualBlock, PlainResidualBlock, FixupBlock)


def _roles_by_structure(model: nn.Module) -> list[Role]:
    """This package's blocks, and neighbours in ``nn.Sequential``; every other layer counts as not placed."""
    roles: dict[str, Role] = {}
    branches = 0
    stages = _places_in_stages(model)
    alone = {m for m in model.modules() if isinstance(m, _BLOCKS) and m not in stages}
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}

    def place(name: str, layer: nn.Module, **place: Any) -> None:
        if name in order:  # a shared layer has its role under its first name
            roles[name] = Role(name, layer, **{"activation_gamma": _fused_gamma(layer), **place})

    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, _BLOCKS) and not _inside_stage(name, model):
            branches += 1
            here = {"branch": branches, "branch_layers": 2, "block": 1, **stages.get(module, {})}
            place(f"{prefix}conv1", module.conv1, activation_gamma=2.0, **here)
            # Several blocks that nothing holds together may be one stage or not.
            sure = module not in alone or len(alone) == 1
            place(f"{prefix}conv2", module.conv2, closes_branch=True, placed=sure, **here)
            if is_layer(module.shortcut):
                place(f"{prefix}shortcut", module.shortcut)
        elif isinstance(module, WNResidualStage):
            place(name, module, branch=branches + 1)
            branches += module.num_blocks
        elif isinstance(module, nn.Sequential):
            for child_name, child, after in _neighbours(module):
                if is_layer(child) and f"{prefix}{child_name}" not in roles:
                    gamma, name_of_other = _with_fused(child, activation_of_module(after) or Activation())
                    place(f"{prefix}{child_name}", child, activation_gamma=gamma, without_gamma=name_of_other)
    for name, module in model.named_modules():
        if is_layer(module) and name not in roles and not _inside_stage(name, model):
            place(name, module, placed=_fused_gamma(module) != 1.0)
    ordered = sorted(roles.values(), key=lambda role: order[role.name])
    if ordered and not ordered[-1].branch and ordered[-1].activation_gamma == 1.0:
        ordered[-1] = replace(ordered[-1], head=True)
    return ordered


def _places_in_stages(model: nn.Module) -> dict[nn.Module, dict[str, int]]:
    """``block`` and ``num_blocks`` of every block that a list or a sequence holds; a projecting one begins a stage."""
    stages: list[list[nn.Module]] = []
    for holder in model.modules():
        if not isinstance(holder, (nn.Sequential, nn.ModuleList)):
            continue
        stage: list[nn.Module] | None = None
        for child in holder:
            if isinstance(child, _BLOCKS):
                if stage is None or is_layer(child.shortcut):
                    stages.append(stage := [])
                stage.append(child)
            elif child is not None and any(map(is_layer, child.modules())):
                stage = None
    return {block: {"block": i, "num_blocks": len(stage)} for stage in stages for i, block in enumerate(stage, start=1)}


def _neighbours(sequence: nn.Sequential) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Every module of a sequence that another one follows, with its name and that other one, from the last to the
    first; shared ones each time. What keeps the statistics up to scale is passed over: where nothing else is left, what
    follows is outside."""
    after: nn.Module | None = None
    for name, child in reversed(sequence._modules.items()):
        if child is None:
            continue
        if after is not None:
            yield name, child, after
        if not isinstance(child, TRANSPARENT_MODULES):
            after = child

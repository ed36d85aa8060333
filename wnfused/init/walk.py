"""One forward pass that stops at every layer: what the data-dependent schemes are made of.

A visitor sees each layer with its real input just before the layer computes, changes its parameters, and the layer's
output, and so every later input, is that of the changed parameters. The blocks of a residual stage, which run inside
one op, are run and visited one by one, unless the stage runs another forward than its class's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from wnfused.init.registry import Context
from wnfused.init.report import Entry
from wnfused.init.trial import arguments_of, evaluating
from wnfused.init.units import Unit, computes_its_own_way
from wnfused.nn import WNResidualStage
from wnfused.nn.residual import has_own_forward, run_as

Visit = Callable[[Unit, Tensor], Entry]


def walk(context: Context, visit: Visit) -> list[Entry]:
    """The entries of ``visit(unit, input)`` for every layer that the sample reaches, in order of execution.

    Batch norms use the sample's statistics and keep their running ones; dropout is off. A layer that is called more
    than once is visited the first time. Layers that are never reached are noted.
    """
    entries: list[Entry] = []
    torch.clear_autocast_cache()
    visit = torch.no_grad()(visit)  # the model's own code may record gradients
    with (
        evaluating(context.model, settle=True),
        _stops(context.units, visit, entries) as reached,
        torch.set_grad_enabled(context.recorded),
    ):
        context.model(*arguments_of(context.sample))
    own = [unit for unit in context.units if _is_behind_own_forward(unit)]
    if own:
        names = ", ".join(unit.shown for unit in own)
        context.notes.append(f"run by a forward of the stage's own, not block by block, left as they started: {names}")
    unreached = [unit.shown for unit in context.units if id(unit) not in reached and unit not in own]
    if unreached:
        context.notes.append(f"not reached by the sample, left as they started: {', '.join(unreached)}")
    return entries


def _is_behind_own_forward(unit: Unit) -> bool:
    return unit.stacked and isinstance(unit.module, WNResidualStage) and has_own_forward(unit.module)


@contextlib.contextmanager
def _stops(units: list[Unit], visit: Visit, entries: list[Entry]) -> Iterator[set[int]]:
    """While this holds, every forward pass visits; yields the identities of the units that were reached."""
    reached: set[int] = set()
    stages: dict[WNResidualStage, list[Unit]] = {}

    def stop(unit: Unit) -> Callable[..., None]:
        def before(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            if id(unit) in reached:
                return
            x, run = _call(module, arguments, keywords)
            if not x.numel():
                return
            reached.add(id(unit))
            entries.append(visit(replace(unit, run=run if computes_its_own_way(module) else None), x))
            _refresh(module)

        return before

    with contextlib.ExitStack() as undo:
        for unit in units:
            if _is_behind_own_forward(unit):
                continue
            if unit.stacked:
                assert isinstance(unit.module, WNResidualStage)
                stages.setdefault(unit.module, []).append(unit)
            else:
                # The last one: the user's own hooks may change the input.
                handle = unit.module.register_forward_pre_hook(stop(unit), with_kwargs=True)
                undo.callback(handle.remove)
        for stage, stacks in stages.items():
            undo.enter_context(_block_by_block(stage, stacks, visit, entries, reached))
        yield reached


def _call(
    module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A layer's input, and the layer as a function of it, without its hooks and with its other arguments held."""
    name = "input" if "input" in keywords else next(iter(keywords), "input")

    def run(x: Tensor) -> Tensor:
        _refresh(module)
        output: Tensor = (
            module.forward(x, *arguments[1:], **keywords) if arguments else module.forward(**{**keywords, name: x})
        )
        return output

    return arguments[0] if arguments else keywords[name], run


def _refresh(module: nn.Module) -> None:
    """What torch keeps of weights that were changed: copies for autocast, and the weight that a hook computed."""
    torch.clear_autocast_cache()
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            hook(module, None)


def _block_by_block(
    stage: WNResidualStage, stacks: list[Unit], visit: Visit, entries: list[Entry], reached: set[int]
) -> contextlib.AbstractContextManager[None]:
    """While this holds, the stage runs its blocks one after the other, and visits on the first pass."""

    def forward(x: Tensor) -> Tensor:
        if stage.transition is not None:
            x = stage.transition(x)
        first_time = id(stacks[0]) not in reached and x.numel() > 0
        if first_time:
            reached.update(map(id, stacks))
        for block, before, last in zip(stage.blocks(), *(unit.layers() for unit in stacks), strict=True):
            if first_time:
                entries.append(visit(before, x))
                entries.append(visit(last, torch.relu(before.pre_activation(x))))
            x = block(x)
        return x

    return run_as(stage, forward)

"""Where in a network a measurement is taken: its stations, in the order of execution.

By default they are the residual blocks, those of a stacked stage one by one, and outside of blocks every module with
parameters of its own; or whatever a filter selects. Hooks find them in any ``nn.Module``, and each is observed while
it runs, so that nothing but the observation outlives it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from wnfused._modules import Filter
from wnfused._numbers import function
from wnfused.diagnostics.arguments import check_by_sample
from wnfused.models.resnet import BatchNormBlock
from wnfused.nn import FixupBlock, PlainResidualBlock, WNResidualBlock, WNResidualStage
from wnfused.nn.residual import has_own_forward, run_as

BLOCKS = (WNResidualBlock, PlainResidualBlock, BatchNormBlock, FixupBlock)


@dataclass(frozen=True)
class Call:
    """One call of a station.

    Attributes:
        name: of the module, or ``stage.blocks.i`` for an identity block of a stage, ``blocks.i`` where the stage is the
            model.
        run: the station as a function of its input, its other arguments held.
        input: a tensor; the first, where there are several, and of those given by keyword where none is by position.
        output: the same of what it returned.
    """

    name: str
    run: Callable[[Tensor], Tensor]
    input: Tensor
    output: Tensor


Observer = Callable[[Call], Tensor | None]
"""Called after each call of a station; a tensor that it returns takes the output's place."""


@contextlib.contextmanager
def observed(
    model: nn.Module, observe: Observer, filter: Filter | None = None, samples: int | None = None, *,
    as_given: bool = False,
) -> Iterator[None]:  # fmt: skip
    """While this holds, ``observe`` sees every call of a station of ``model``; no hook is left behind.

    Args:
        filter: from (name, module) to whether the module is a station; a stage for which it is true is observed block
            by block, but for one whose forward is not its class's: that is observed whole.
        samples: how many entries the first dim of every output must have; None: any.
        as_given: whether each ``Call.input`` is a copy from before the call, as a station may write its input in place.

    Raises:
        ValueError: naming a station whose outputs are not one for each sample.
    """
    function(filter=filter)
    selected = default_filter(model) if filter is None else filter
    busy = False

    def report(call: Call) -> Tensor | None:
        """An observer may run the station again; what it calls inside is no call of the network's."""
        nonlocal busy
        if busy:
            return None
        if samples is not None:
            check_by_sample(f"filter: the output of {call.name!r}", call.output, samples)
        busy = True
        try:
            return observe(call)
        finally:
            busy = False

    with contextlib.ExitStack() as undo:
        for name, module in model.named_modules():
            if not selected(name, module):
                continue
            if isinstance(module, WNResidualStage) and not has_own_forward(module):
                undo.enter_context(_block_by_block(name, module, report))
                continue
            copies: list[Tensor | None] = []
            if as_given:
                undo.callback(module.register_forward_pre_hook(_copying(copies), with_kwargs=True).remove)
            undo.callback(module.register_forward_hook(_hook(name, report, copies), with_kwargs=True).remove)
        yield


def default_filter(model: nn.Module) -> Filter:
    """Blocks and stages as a whole; outside of them every module that has parameters of its own."""
    inside: set[int] = set()
    hidden: set[int] = set()  # blocks, too
    for module in model.modules():
        # A parametrisation is a module that makes a weight, not one that data passes through.
        wholes: list[nn.Module] = [module] if isinstance(module, BLOCKS) else []
        if isinstance(module, WNResidualStage) and has_own_forward(module):
            wholes.append(module)
            hidden.update(id(part) for part in module.modules() if part is not module)
        if parametrize.is_parametrized(module):
            wholes.append(module.parametrizations)  # type: ignore[arg-type]
            inside.update(id(part) for part in module.parametrizations.modules())  # type: ignore[union-attr]
        inside.update(id(part) for whole in wholes for part in whole.modules() if part is not whole)

    def selected(name: str, module: nn.Module) -> bool:
        if isinstance(module, (*BLOCKS, WNResidualStage)):
            return id(module) not in hidden
        own = next(module.parameters(recurse=False), None) is not None or parametrize.is_parametrized(module)
        return own and id(module) not in inside

    return selected


def _hook(name: str, report: Observer, copies: list[Tensor | None]) -> Callable[..., Any]:
    """``copies``: of the inputs of calls that have begun, the last one's last; empty where none are made."""

    def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        copy = copies.pop() if copies else None
        first = _first(output)
        place, given = _first_input(arguments, keywords)
        if first is None or given is None:
            return None

        def run(x: Tensor) -> Tensor:
            by_position = [x if i == place else a for i, a in enumerate(arguments)]
            by_keyword = {key: x if key == place else a for key, a in keywords.items()}
            result = _first(module.forward(*by_position, **by_keyword))
            assert result is not None
            return result

        replacement = report(Call(name, run, given if copy is None else copy, first))
        return None if replacement is None else _with_first(output, replacement)

    return hook


def _copying(copies: list[Tensor | None]) -> Callable[..., None]:
    """A hook before a call that keeps its input as it is then."""

    def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        _, given = _first_input(arguments, keywords)
        copies.append(None if given is None else given.clone())

    return hook


def _first_input(arguments: Sequence[Any], keywords: dict[str, Any]) -> tuple[int | str | None, Tensor | None]:
    """The number or keyword of a call's first tensor, and this; None for both where it has none."""
    given: dict[Any, Any] = {**dict(enumerate(arguments)), **keywords}
    place = next((place for place, value in given.items() if isinstance(value, Tensor)), None)
    return place, None if place is None else given[place]


def _first(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, (tuple, list)):
        return next((part for part in output if isinstance(part, Tensor)), None)
    return None


def _with_first(output: Any, replacement: Tensor) -> Any:
    if isinstance(output, Tensor):
        return replacement
    parts = list(output)
    parts[next(i for i, part in enumerate(parts) if isinstance(part, Tensor))] = replacement
    return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)


def _block_by_block(name: str, stage: WNResidualStage, report: Observer) -> contextlib.AbstractContextManager[None]:
    """While this holds, the stage runs its blocks one after the other instead of as one op."""

    def forward(x: Tensor) -> Tensor:
        if stage.transition is not None:
            # A module, with a hook of its own.
            x = stage.transition(x)
        for i, block in enumerate(stage.blocks()):
            y = block(x)
            replacement = report(Call(f"{name}.blocks.{i}".lstrip("."), block, x, y))
            x = y if replacement is None else replacement
        return x

    return run_as(stage, forward)

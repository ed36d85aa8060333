"""Many models of one architecture initialised in one go: a population over seeds."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from wnfused._modules import check_module
from wnfused._numbers import random_source
from wnfused.init.processes import decided_by_first_process
from wnfused.init.registry import Context, check_request, guarded, prepared, run_scheme
from wnfused.init.report import Report

T = TypeVar("T")


@torch.no_grad()
def initialize_population(
    models: Sequence[nn.Module],
    scheme: str = "daneshmand2021",
    *,
    sample: Tensor | tuple[Tensor, ...] | None = None,
    generators: Sequence[torch.Generator | None] | None = None,
    **options: object,
) -> list[Report]:
    """``initialize`` for every model of a population, whose members go from layer to layer together.

    A scheme that decomposes each layer's input (``daneshmand2021``) does so for all models at once, by one batched
    call. What comes out is what ``initialize`` gives each alone, up to rounding.

    Args:
        models: of one architecture, whose forward draws no random numbers in evaluation mode.
        scheme, sample, options: as in ``initialize``.
        generators: one for each model, on its device. In place of None one is made that torch's own generator seeds,
            model by model.

    Returns:
        One report for each model.

    Raises:
        ValueError, TypeError: as ``initialize``; no model, one more than once, models that differ in their parameters'
            shapes or in the inputs that reach a layer, or another number of generators.
    """
    if not isinstance(models, (Sequence, nn.ModuleList)):  # of which nn.Sequential is none: it is one model
        raise TypeError(f"models: expected a sequence of models, got {type(models).__name__}")
    if generators is not None and not isinstance(generators, Sequence):
        raise TypeError(f"generators: expected a sequence with one for each model, got {type(generators).__name__}")
    population = list(models)
    if not population:
        raise ValueError("models: is empty; give at least one")
    if len({id(model) for model in population}) < len(population):
        raise ValueError("models: hold one model more than once; give each its own")
    for i, model in enumerate(population):
        check_module(**{f"models[{i}]": model})
        check_request(model, scheme, options)
    _refuse_mixed(population)
    sources = [None] * len(population) if generators is None else list(generators)
    if len(sources) != len(population):
        raise ValueError(f"generators: {len(sources)} for {len(population)} models; give one for each")
    random_source(**{f"generators[{i}]": generator for i, generator in enumerate(sources)})
    together = nn.ModuleList(population)

    def initialise() -> list[Report]:
        given = [_seeded(m) if g is None else g for m, g in zip(population, sources, strict=True)]
        contexts = [prepared(m, scheme, sample, g) for m, g in zip(population, given, strict=True)]
        _refuse_mixed(population)  # once more, for lazy layers have shapes now
        return _in_step(contexts, scheme, options)

    with guarded(together, scheme):
        return decided_by_first_process(together, initialise)


def _refuse_mixed(population: list[nn.Module]) -> None:
    shapes = [
        [(name, None if is_lazy(p) else tuple(p.shape)) for name, p in model.named_parameters()] for model in population
    ]
    if any(other != shapes[0] for other in shapes):
        raise ValueError("models: differ in their parameters; use models of one architecture")


def _seeded(model: nn.Module) -> torch.Generator | None:
    """A generator of the model's own, since its thread would race for torch's. A model on several devices draws on
    each, for which there is no generator but torch's."""
    seed = int(torch.randint(2**63 - 1, (), device="cpu"))
    devices = {parameter.device for parameter in model.parameters()}
    return torch.Generator(devices.pop()).manual_seed(seed) if len(devices) == 1 else None


def _in_step(contexts: list[Context], scheme: str, options: dict[str, Any]) -> list[Report]:
    """Each model in a thread of its own, which waits for the others wherever something is solved together."""
    meeting = _Meeting(len(contexts))

    def run(place: int) -> Report:
        def together(x: Tensor, solve: Callable[[list[Tensor]], list[T]], /) -> T:
            return meeting.solve(place, x, solve)

        try:
            with torch.no_grad():
                return run_scheme(replace(contexts[place], together=together), scheme, options)
        finally:
            meeting.leave(place)

    with ThreadPoolExecutor(len(contexts)) as pool:
        running = [pool.submit(contextvars.copy_context().run, run, place) for place in range(len(contexts))]
    errors = [future.exception() for future in running]
    # Where one fails, the others only report that it is gone.
    told = [error for error in errors if error is not None]
    first = [error for error in told if not isinstance(error, _MemberLeftError)] or told
    if first:
        raise first[0]
    return [future.result() for future in running]


_REMEDY = "use models of one forward, or initialise each by itself"


class _MemberLeftError(ValueError):
    """One model waits for another one that has come to its end, or failed."""


class _Meeting:
    """Where threads bring one item each, and the last to come solves for all; nobody waits for one that has left."""

    def __init__(self, parties: int) -> None:
        self._parties = parties
        self._changed = threading.Condition()
        self._items: dict[int, Tensor] = {}
        self._results: list[Any] = []
        self._rounds = 0
        self._left: int | None = None  # the first that has

    def solve(self, place: int, item: Tensor, solve: Callable[[list[Tensor]], list[T]]) -> T:
        with self._changed:
            self._items[place] = item
            if len(self._items) == self._parties:
                items = [self._items[i] for i in range(self._parties)]
                _refuse_different(items)
                self._results = solve(items)
                self._items.clear()
                self._rounds += 1
                self._changed.notify_all()
            else:
                begun = self._rounds
                self._changed.wait_for(lambda: self._rounds > begun or self._left is not None)
                if self._rounds == begun:
                    assert self._left is not None
                    raise _MemberLeftError(
                        f"models: [{place}] has inputs for a layer for which [{self._left}] has none; {_REMEDY}"
                    )
            result: T = self._results[place]
            return result

    def leave(self, place: int) -> None:
        with self._changed:
            if self._left is None:
                self._left = place
            self._changed.notify_all()


def _refuse_different(items: list[Tensor]) -> None:
    """What is solved together is stacked."""
    for i, item in enumerate(items):
        if item.shape != items[0].shape or item.dtype != items[0].dtype:
            raise ValueError(
                f"models: [{i}] gives a layer inputs of shape {list(item.shape)} and {item.dtype}, [0] of "
                f"{list(items[0].shape)} and {items[0].dtype}; {_REMEDY}"
            )

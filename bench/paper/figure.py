"""What a figure's file provides, and the small types that travel between it and the runner."""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from bench.paper import FIGURES

SIZES = ("quick", "small", "full")

Json = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One independent piece of work.

    Attributes:
        name: unique in its figure; a file name.
        parameters: everything its result depends on, in plain JSON types.
        round: rounds are run in order, and one after the first only if it fits the figure's budget as a whole. A
            round holds one seed, or a few, of everything, so that what a small budget leaves out is repetitions.
    """

    name: str
    parameters: Json
    round: int = 0


@dataclass(frozen=True)
class Result:
    """What ``run`` returned for a job's parameters."""

    parameters: Json
    values: Json

    def __getitem__(self, name: str) -> Any:
        """A parameter, or else a value."""
        return self.parameters[name] if name in self.parameters else self.values[name]


@dataclass(frozen=True)
class Verdict:
    """What the paper says, what came out, and whether the one supports the other; None: what was run cannot tell.

    ``reason``: where it does not, what was found of the cause.
    """

    paper: str
    outcome: str
    agrees: bool | None
    reason: str = ""

    @property
    def word(self) -> str:
        return {True: "agrees", False: "disagrees", None: "undecided"}[self.agrees]


class Figure(Protocol):
    """A module of this package.

    Attributes:
        TITLE: one line.
        SOURCE: paper and place.
        MINUTES: its share of an hour of two cores: ``2 * MINUTES`` core-minutes.
        SETTINGS: by size (``quick`` for tests, ``small``, ``full``), in plain JSON types.
        NOTE: how the small size differs from the paper's, in one or two sentences.
    """

    TITLE: str
    SOURCE: str
    NOTE: str
    MINUTES: float
    SETTINGS: Mapping[str, Json]

    def jobs(self, settings: Json) -> list[Job]:
        """All jobs of these settings."""

    def run(self, parameters: Json) -> Json:
        """Do one job, in a process with one thread. What it returns is JSON: no NaN (see ``number``)."""

    def reduce(self, settings: Json, results: list[Result]) -> Json:
        """The figure's data, from the results there are: budgets and failures may leave out any of them."""

    def verdicts(self, data: Json) -> list[Verdict]:
        """The paper's claims, each judged by a predicate on the data."""

    def draw(self, data: Json) -> Any:
        """A matplotlib figure."""


def load(name: str) -> Figure:
    """The figure's module: one of this package, or any that can be imported."""
    return importlib.import_module(f"bench.paper.{name}" if name in FIGURES else name)  # type: ignore[return-value]


def number(value: float) -> float | None:
    """JSON has no NaN and no infinity: None."""
    value = float(value)
    return value if math.isfinite(value) else None


def grouped(results: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """The results by their key, keys in order of first appearance."""
    groups: dict[Any, list[T]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return groups


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (of the sample; 0 for one value) of the finite ones of some numbers."""

    mean: float | None
    std: float | None
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread:
        finite = [v for v in values if v is not None and math.isfinite(v)]
        if not finite:
            return cls(None, None, 0)
        return cls(statistics.fmean(finite), statistics.stdev(finite) if len(finite) > 1 else 0.0, len(finite))

    def __str__(self) -> str:
        if self.mean is None:
            return "no finite value"
        return f"{self.mean:.3g}" + (f" ± {self.std:.2g}" if self.count > 1 else "")


def slope(x: Iterable[float], y: Iterable[float]) -> float:
    """Of the least-squares line through the points."""
    return statistics.linear_regression(list(x), list(y)).slope


def all_known(values: Iterable[bool | None]) -> bool | None:
    """Conjunction of three truth values: False if one is, otherwise None if one is, otherwise True; None for none."""
    found = list(values)
    if any(value is False for value in found):
        return False
    return None if not found or any(value is None for value in found) else True

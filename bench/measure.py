"""Paired, interleaved timing: every round runs each peer once, in an order that rotates.

A noisy machine speeds up and slows down for all peers of a round alike, so the statistic is the ratio *within* a
round, and what is reported is its median and quartiles over the rounds. Rounds go on until every median ratio is
known to ``PRECISION`` or the time budget is spent.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

# A sample repeats a short call until it lasts this long: far above the clock's resolution and a context switch.
SAMPLE_SECONDS = 2e-3
MAX_REPEATS = 1000
MIN_ROUNDS, MAX_ROUNDS = 5, 200
# Half the width of the median's confidence interval, relative to the median.
PRECISION = 0.01


@dataclass(frozen=True)
class Runner:
    """One peer of a case: ``call`` is what is timed, inside a fresh ``context()`` that is entered untimed.

    ``settle`` waits until the device has done what it was told, before a clock is read.
    """

    name: str
    call: Callable[[], Any]
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    settle: Callable[[], None] | None = None


@dataclass
class Samples:
    """Seconds a call, by peer and round, and what ``beside`` returned in each round."""

    seconds: dict[str, list[float]]
    beside: list[Any] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return min(map(len, self.seconds.values()))

    def ratios(self, name: str, base: str) -> list[float]:
        """``name`` over ``base``, round by round."""
        return [a / b for a, b in zip(self.seconds[name], self.seconds[base], strict=True)]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def over(self, divisor: float) -> Spread:
        """The spread of values that are so many times smaller."""
        return Spread(self.median / divisor, self.low / divisor, self.high / divisor)

    def uncertainty(self, count: int) -> float:
        """Half the 95% confidence interval of the median of ``count`` values, relative to it (McGill et al. 1978)."""
        return 1.57 * (self.high - self.low) / math.sqrt(count) / self.median


def interleave(
    runners: Sequence[Runner],
    base: str,
    budget: float,
    *,
    beside: Callable[[], Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    min_rounds: int = MIN_ROUNDS,
    max_rounds: int = MAX_ROUNDS,
    sample_seconds: float = SAMPLE_SECONDS,
) -> Samples:
    """Times all runners round by round.

    Args:
        runners: at least one; every one has run before, so that compilation and first allocations are behind it.
        base: the name of the runner that the others are divided by.
        budget: seconds after which no further round begins, once ``min_rounds`` are done.
        beside: measured once a round too, such as the machine's peak.
        clock: seconds, monotonic.
        sample_seconds: a call is repeated until a sample lasts as long.
    """
    repeats = {runner.name: _repeats(runner, clock, sample_seconds) for runner in runners}
    samples = Samples({runner.name: [] for runner in runners})
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        start = clock()
        while samples.rounds < min_rounds or (
            samples.rounds < max_rounds and clock() - start < budget and not _precise(samples, base)
        ):
            for runner in _order(runners, samples.rounds):
                samples.seconds[runner.name].append(_time(runner, repeats[runner.name], clock))
            if beside is not None:
                samples.beside.append(beside())
    finally:
        if collecting:
            gc.enable()
    return samples


def _order(runners: Sequence[Runner], number: int) -> list[Runner]:
    """Turned round every other round and rotated by one every second: each is first, and last, equally often."""
    shift = number // 2 % len(runners)
    order = [*runners[shift:], *runners[:shift]]
    return order[::-1] if number % 2 else order


def _time(runner: Runner, repeats: int, clock: Callable[[], float]) -> float:
    call, settle = runner.call, runner.settle
    with runner.context():
        if settle is not None:
            settle()
        start = clock()
        for _ in range(repeats):
            call()
        if settle is not None:
            settle()
        return (clock() - start) / repeats


def _repeats(runner: Runner, clock: Callable[[], float], sample_seconds: float) -> int:
    """How many calls make a sample; the calls that find out warm the caches up."""
    _time(runner, 1, clock)
    once = _time(runner, 1, clock)
    return max(1, min(MAX_REPEATS, math.ceil(sample_seconds / once))) if once > 0 else MAX_REPEATS


def _precise(samples: Samples, base: str) -> bool:
    spreads = [Spread.of(samples.ratios(name, base)) for name in samples.seconds if name != base]
    return all(spread.uncertainty(samples.rounds) < PRECISION for spread in spreads)

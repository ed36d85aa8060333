"""The machine in one round of a measurement: how fast it multiplies, and how far apart its cores are.

A virtual machine's host may move its cores between dies from one second to the next. What crosses from core to core,
such as every map of a small batch that two threads share, then takes ten times as long, for every peer, but not alike:
medians over such rounds describe neither state, so rounds are told apart by what a line of memory takes to cross
(``torch.ops.wnfused_native.cpu_crossing_seconds() -> float``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench.ceiling import Ceiling
from wnfused.backends import native

# Within a die a line crosses in 20 to 60 ns, between dies or sockets in 100 to 400.
FAR = 100e-9


@dataclass(frozen=True)
class Moment:
    """``peak``: FLOP/s of the machine's ceiling; ``crossing``: seconds a line takes from core to core, or NaN."""

    peak: float
    crossing: float


def moments(peak: Ceiling) -> Callable[[], Moment]:
    """Measures the machine once a call; without the C++ library no crossing."""
    known = native.unavailable() is None
    return lambda: Moment(peak.rate(), torch.ops.wnfused_native.cpu_crossing_seconds() if known else math.nan)


def distances(taken: Sequence[Moment]) -> list[str]:
    """``"near"`` or ``"far"`` by round where the cores were so before and after it, else ``"mixed"``."""
    found = ["far" if m.crossing > FAR else "near" if m.crossing <= FAR else "mixed" for m in taken]
    return [a if a == b else "mixed" for a, b in zip([*found[:1], *found[:-1]], found, strict=True)]

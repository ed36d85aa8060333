"""What one case gives: a workload's pass with the spreads of its peers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.measure import Samples, Spread
from bench.moment import distances
from bench.workloads import Workload

MIN_APART = 3  # rounds, for a median


@dataclass(frozen=True)
class Apart:
    """The rounds, and their ratios, in which the cores were ``"near"`` each other or ``"far"`` apart."""

    rounds: int
    ratios: dict[str, Spread]


@dataclass
class Result:
    """``seconds`` by peer, the base first; ``ratios`` of the other peers over the base; ``share`` of the peak.

    ``errors`` are those of the gate, ``skipped`` says why a peer could not run, ``failed`` how one failed the gate:
    neither has numbers. ``crossing`` is what a line of memory took from core to core, in seconds, and ``apart`` tells
    the rounds by it where they differ. ``peak_bytes`` is there for peers that ran in a process of their own. ``layers``
    is the depth of a network.
    """

    group: str
    workload: str
    pass_name: str
    base: str = ""
    rounds: int = 0
    seconds: dict[str, Spread] = field(default_factory=dict)
    ratios: dict[str, Spread] = field(default_factory=dict)
    flops: int | None = None
    share: Spread | None = None
    ceiling: str = ""
    ceiling_flops: Spread | None = None
    crossing: Spread | None = None
    apart: dict[str, Apart] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    layers: int | None = None

    @classmethod
    def of(cls, workload: Workload, pass_name: str) -> Result:
        return cls(workload.group, workload.name, pass_name, layers=getattr(workload, "depth", None))

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells this result from every other of a run."""
        return self.group, self.workload, self.pass_name

    def measured(self, samples: Samples, base: str) -> None:
        """Takes over the spreads of one interleaved measurement."""
        self.base, self.rounds = base, samples.rounds
        self.seconds = {name: Spread.of(values) for name, values in samples.seconds.items()}
        self.ratios = {name: Spread.of(samples.ratios(name, base)) for name in samples.seconds if name != base}

    def compared_with_peak(self, samples: Samples, flops: int, ceiling: str) -> None:
        """The base's FLOP/s over the peak of the same round."""
        self.flops, self.ceiling = flops, ceiling
        peaks = [moment.peak for moment in samples.beside]
        rates = [flops / seconds for seconds in samples.seconds[self.base]]
        self.share = Spread.of([rate / peak for rate, peak in zip(rates, peaks, strict=True)])
        self.ceiling_flops = Spread.of(peaks)

    def told_apart(self, samples: Samples) -> None:
        """The rounds by the distance of the cores."""
        crossings = [moment.crossing for moment in samples.beside if not math.isnan(moment.crossing)]
        if not crossings:
            return
        self.crossing = Spread.of(crossings)
        found = distances(samples.beside)
        for distance in ("near", "far") if len(set(found)) > 1 else ():
            rounds = [i for i, it in enumerate(found) if it == distance]
            ratios = {name: [samples.ratios(name, self.base)[i] for i in rounds] for name in self.ratios}
            if len(rounds) >= MIN_APART:
                self.apart[distance] = Apart(len(rounds), {name: Spread.of(them) for name, them in ratios.items()})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Result:
        """What ``to_dict`` gave."""
        made = cls(**{name: value for name, value in saved.items() if name != "apart"})
        for name in ("seconds", "ratios"):
            setattr(made, name, {peer: Spread(**spread) for peer, spread in saved[name].items()})
        for name in ("share", "ceiling_flops", "crossing"):
            setattr(made, name, saved.get(name) and Spread(**saved[name]))
        for distance, part in saved.get("apart", {}).items():
            ratios = {peer: Spread(**spread) for peer, spread in part["ratios"].items()}
            made.apart[distance] = Apart(part["rounds"], ratios)
        return made

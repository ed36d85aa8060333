"""What one case gives: a workload's pass with the spreads of its peers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from bench.measure import Samples, Spread
from bench.workloads import Workload


@dataclass
class Result:
    """``seconds`` by peer, the base first; ``ratios`` of the other peers over the base; ``share`` of the peak.

    ``errors`` are those of the gate, ``skipped`` says why a peer could not run, ``failed`` how one failed the gate:
    neither has numbers. ``peak_bytes`` is there for peers that ran in a process of their own. ``layers`` is the depth
    of a network.
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
        rates = [flops / seconds for seconds in samples.seconds[self.base]]
        self.share = Spread.of([rate / peak for rate, peak in zip(rates, samples.beside, strict=True)])
        self.ceiling_flops = Spread.of(samples.beside)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Result:
        """What ``to_dict`` gave."""
        made = cls(**saved)
        for name in ("seconds", "ratios"):
            setattr(made, name, {peer: Spread(**spread) for peer, spread in saved[name].items()})
        for name in ("share", "ceiling_flops"):
            setattr(made, name, saved[name] and Spread(**saved[name]))
        return made

"""The pictures: bars of ratios by group, and the cost per layer over the depth. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.flat import FLAT
from bench.measure import Spread
from bench.report import PASSES
from bench.result import Result
from bench.workloads import BACKWARD, WORKLOADS, Network

COLOURS = {
    "eager": "#4c6ef5",
    "eager cl": "#91a7ff",
    "eager bf16": "#15aabf",
    "plain": "#f08c00",
    "plain cl": "#ffc078",
    "plain bf16": "#e8590c",
    "eager pure bf16": "#15aabf",
    "plain pure bf16": "#e8590c",
    "compile": "#7048e8",
    "reference": "#868e96",
    "loop": "#4c6ef5",
}
BAR = 0.15  # inches
GAP = 1.0  # bars between two cases
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def ratio_bars(results: Sequence[Result], facts: dict[str, Any], folder: Path) -> list[Path]:
    """``ratios-GROUP.png`` for each group that has ratios: how many times longer each peer takes."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        if result.ratios:
            groups.setdefault(result.group, []).append(result)
    return [_group_bars(name, group, facts, folder / f"ratios-{name}.png") for name, group in groups.items()]


def _group_bars(name: str, group: Sequence[Result], facts: dict[str, Any], target: Path) -> Path:
    from matplotlib.figure import Figure

    bars = sum(len(result.ratios) + GAP for result in group)
    figure = Figure(figsize=(9, BAR * bars + 1.3), layout="constrained")
    axis = figure.subplots()
    labels, ticks, position, seen = [], [], 0.0, set()
    for result in group:
        ticks.append(position + (len(result.ratios) - 1) / 2)
        labels.append(f"{result.workload}  ({PASSES.get(result.pass_name, result.pass_name)})")
        for peer, spread in result.ratios.items():
            _bar(axis, position, spread, COLOURS.get(peer, "#495057"), None if peer in seen else peer)
            seen.add(peer)
            position += 1
        position += GAP
    axis.set_yticks(ticks, labels, fontsize=8)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(position - GAP, -1)
    spreads = [spread for result in group for spread in result.ratios.values()]
    _ratio_axis(axis, min(s.low for s in spreads), max(s.high for s in spreads))
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axis.set_title(name, loc="left", fontsize=11, fontweight="bold")
    figure.suptitle(_origin(facts), fontsize=8, color="#495057")
    figure.savefig(target, dpi=130)
    return target


def _origin(facts: dict[str, Any]) -> str:
    return (
        f"{facts['cpu']}, {facts['threads']} threads, torch {facts['torch']}, commit {facts['commit']}, "
        f"{facts['date'][:10]}"
    )


def _bar(axis: Any, position: float, spread: Spread, colour: str, label: str | None) -> None:
    """From 1 to the median, so that left and right of the line mean what they should; whiskers are the quartiles."""
    whiskers = [[spread.median - spread.low], [spread.high - spread.median]]
    style = {"elinewidth": 0.9, "ecolor": "#212529"}
    axis.barh(
        position, spread.median - 1, left=1, height=0.85, color=colour, label=label, xerr=whiskers, error_kw=style
    )
    right = spread.median >= 1
    at = max(spread.high, 1.0) if right else min(spread.low, 1.0)
    side, text = ("left", f" {spread.median:.2f}") if right else ("right", f"{spread.median:.2f} ")
    axis.text(at, position, text, va="center", ha=side, fontsize=7)


def _ratio_axis(axis: Any, lowest: float, highest: float) -> None:
    from matplotlib.ticker import NullFormatter, NullLocator

    axis.set_xscale("log")
    left, right = min(0.8, lowest / 1.5), max(2.0, highest * 1.5)
    axis.set_xlim(left, right)
    shown = [tick for tick in TICKS if left <= tick <= right]
    axis.set_xticks(shown, [f"{tick:g}" for tick in shown])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.axvline(1, color="#212529", linewidth=1)
    axis.set_xlabel("time of the peer / time of ours, log scale: right of the line ours is faster", fontsize=8)
    axis.grid(axis="x", color="#dee2e6", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)


def cost_per_layer(results: Sequence[Result], facts: dict[str, Any], folder: Path) -> list[Path]:
    """``cost_per_layer.png``: forward and backward of a network divided by its depth. Needs two depths at least.

    Ours are the networks that took turns (group ``flat``) where the run has them.
    """
    from matplotlib.figure import Figure

    networks = {(w.group, w.name): w for whole in WORKLOADS for w in whole.parts() if isinstance(w, Network)}
    groups = ("depth", "deep", "flat")
    points = [r for r in results if r.group in groups and r.pass_name == BACKWARD and r.base]
    lines: dict[tuple[str, int], dict[int, Spread]] = {}
    for result in points:
        network = networks[result.group, result.workload]
        for peer, spread in result.seconds.items():
            if peer != FLAT:
                lines.setdefault((peer, network.batch), {})[network.depth] = spread.over(network.depth * 1e-6)
    depths = sorted({depth for line in lines.values() for depth in line})
    if len(depths) < 2:
        return []
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axis = figure.subplots()
    bases = {result.base for result in points}
    for (peer, batch), line in lines.items():
        x, spreads = list(line), list(line.values())
        spans = [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
        colour = ("#2b8a3e" if batch == 1 else "#8ce99a") if peer in bases else COLOURS.get(peer, "#495057")
        label = f"{f'ours ({peer})' if peer in bases else peer}, batch {batch}"
        axis.errorbar(x, [s.median for s in spreads], yerr=spans, marker="o", capsize=3, color=colour, label=label)
    axis.set_xscale("log")
    axis.set_xticks(depths, [f"{depth:,}" for depth in depths])
    axis.minorticks_off()
    axis.set_ylim(0)
    axis.set_xlabel("layers")
    axis.set_ylabel("forward + backward, microseconds a layer")
    axis.set_title(f"WRN of width 1, 32x32 ({facts['cpu']}, {facts['threads']} threads)", fontsize=9)
    axis.grid(color="#dee2e6", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=len(lines))
    target = folder / "cost_per_layer.png"
    figure.savefig(target, dpi=130)
    return [target]

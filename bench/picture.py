"""The pictures: bars of ratios by group, and the cost per layer over the depth. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    "compile": "#7048e8",
    "reference": "#868e96",
    "loop": "#4c6ef5",
}
BAR, GAP = 0.17, 0.55  # inches: a bar, and the space around a case's bars


def ratio_bars(results: Sequence[Result], facts: dict[str, Any], target: Path) -> Path | None:
    """One panel a group: how many times longer each peer takes. None where there is no ratio."""
    from matplotlib.figure import Figure

    results = [result for result in results if result.ratios]
    groups = {r.group: [s for s in results if s.group == r.group] for r in results}
    if not groups:
        return None
    heights = [sum(BAR * len(r.ratios) + GAP * BAR * 2 for r in group) + 0.75 for group in groups.values()]
    figure = Figure(figsize=(10, sum(heights) + 0.9), layout="constrained")
    axes = figure.subplots(len(groups), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axis, (name, group) in zip(axes, groups.items(), strict=True):
        _panel(axis, name, group)
    axes[-1].set_xlabel("time of the peer / time of ours (log scale; right of the line ours is faster)")
    figure.suptitle(
        f"{facts['cpu']}, {facts['threads']} threads, torch {facts['torch']}, commit {facts['commit']}, "
        f"{facts['date'][:10]}",
        fontsize=9,
    )
    figure.savefig(target, dpi=130)
    return target


def _panel(axis: Any, name: str, group: Sequence[Result]) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    ticks, labels, position, seen = [], [], 0.0, set()
    for result in group:
        first = position
        for peer, spread in result.ratios.items():
            axis.barh(
                position,
                spread.median,
                height=0.85,
                color=COLOURS.get(peer, "#495057"),
                label=None if peer in seen else peer,
                xerr=[[spread.median - spread.low], [spread.high - spread.median]],
                error_kw={"elinewidth": 0.8, "ecolor": "#212529"},
            )
            axis.text(spread.high * 1.02, position, f" {spread.median:.3g}", va="center", fontsize=7)
            seen.add(peer)
            position += 1
        ticks.append((first + position - 1) / 2)
        labels.append(f"{result.workload}  ({PASSES.get(result.pass_name, result.pass_name)})")
        position += 2 * GAP
    axis.axvline(1, color="#212529", linewidth=1)
    axis.set_xscale("log")
    highest = max(spread.high for result in group for spread in result.ratios.values())
    lowest = min(spread.low for result in group for spread in result.ratios.values())
    axis.set_xlim(min(0.5, lowest / 1.2), max(2.0, highest * 1.6))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xticks(
        [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if axis.get_xlim()[0] <= t <= axis.get_xlim()[1]]
    )
    axis.set_yticks(ticks, labels, fontsize=8)
    axis.set_ylim(position - GAP, -1)
    axis.set_title(name, loc="left", fontsize=10, fontweight="bold")
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axis.grid(axis="x", color="#dee2e6", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def cost_per_layer(results: Sequence[Result], facts: dict[str, Any], target: Path) -> Path | None:
    """Forward and backward of a whole network divided by its depth. None where fewer than two depths were measured."""
    from matplotlib.figure import Figure

    depths = {w.name: w.depth for w in WORKLOADS if isinstance(w, Network) and w.group in ("depth", "deep")}
    points = [r for r in results if r.group in ("depth", "deep") and r.pass_name == BACKWARD and r.base]
    if len(points) < 2:
        return None
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axis = figure.subplots()
    for peer in dict.fromkeys(name for r in points for name in r.seconds):
        ours = any(r.base == peer for r in points)
        line = [(depths[r.workload], r.seconds[peer]) for r in points if peer in r.seconds]
        x = [depth for depth, _ in line]
        y = [spread.median / depth * 1e6 for depth, spread in line]
        spans = [[(s.median - s.low) / d * 1e6 for d, s in line], [(s.high - s.median) / d * 1e6 for d, s in line]]
        colour = "#2b8a3e" if ours else COLOURS.get(peer, "#495057")
        title = f"ours ({peer})" if ours else peer
        axis.errorbar(x, y, yerr=spans, marker="o", capsize=3, color=colour, label=title)
    axis.set_xscale("log")
    axis.set_xticks(sorted(set(depths.values())), [f"{depth:,}" for depth in sorted(set(depths.values()))])
    axis.minorticks_off()
    axis.set_ylim(0)
    axis.set_xlabel("layers")
    axis.set_ylabel("forward + backward, microseconds a layer")
    axis.set_title(f"WRN of width 1, 32x32, batch 1 ({facts['cpu']}, {facts['threads']} threads)", fontsize=9)
    axis.grid(color="#dee2e6", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(target, dpi=130)
    return target

"""The picture of trained networks: accuracy over depth. Saved as PNG; no display is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from wnfused.diagnostics.drawing import COLOURS, DASHES, MARKERS, new_axes
from wnfused.train.errors import UsageError


@dataclass(frozen=True)
class Point:
    """One trained network; ``accuracy`` is a share of 1, None if the run diverged."""

    depth: int
    accuracy: float | None


def accuracy_over_depth(series: Mapping[str, Sequence[Point]], title: str, chance: float, path: Path) -> None:
    """Test accuracy over the number of layers, one line for each entry; crosses where a run diverged."""
    (axis,) = new_axes(1)
    for i, (name, points) in enumerate(series.items()):
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        trained = [p for p in points if p.accuracy is not None]
        diverged = [p.depth for p in points if p.accuracy is None]
        axis.plot(
            [p.depth for p in trained],
            [100 * p.accuracy for p in trained if p.accuracy is not None],
            color=colour,
            marker=marker,
            markersize=7,
            # Points of several lines may lie upon each other: all but the first are hollow.
            markerfacecolor=colour if i == 0 else "white",
            markeredgewidth=1.8,
            linestyle=DASHES[i % len(DASHES)],
            label=name,
        )
        axis.plot(
            diverged,
            [0] * len(diverged),
            "x",
            color=colour,
            markersize=10,
            markeredgewidth=2.5,
            clip_on=False,
        )
        for depth in diverged:
            axis.annotate(
                "diverged",
                (depth, 0),
                (0, 9),
                textcoords="offset points",
                ha="center",
                color=colour,
                fontsize=9,
            )
    depths = sorted({p.depth for points in series.values() for p in points})
    axis.axhline(100 * chance, color="0.6", linewidth=1, linestyle=":")
    axis.annotate("chance", (0.005, 100 * chance), xycoords=("axes fraction", "data"), va="bottom", color="0.4", size=9)
    axis.set_xscale("log")
    axis.set_xticks(depths, [f"{depth:,}" for depth in depths])
    axis.minorticks_off()
    axis.set_xlim(depths[0] / 1.4, depths[-1] * 1.4)
    axis.set_ylim(0, 102)
    axis.set_xlabel("depth (layers)")
    axis.set_ylabel("test accuracy (%)")
    axis.set_title(title, fontsize=11)
    # The lines run along the top; the space above the crosses is free.
    axis.legend(title="initialisation", loc="center left", alignment="left", frameon=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        axis.figure.savefig(path, dpi=160)
    except OSError as error:
        raise UsageError("out", path, f"cannot be written: {error.strerror}") from None

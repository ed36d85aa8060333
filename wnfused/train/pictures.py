"""The pictures: accuracy over depth, and norms over the layers. Saved as PNG; no display is needed.

Colours are Okabe and Ito's, told apart with every kind of colour vision; each line has a marker or a dash of its own
besides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wnfused.diagnostics import Norms

from .errors import UsageError, require

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
_MARKERS = ("o", "s", "^", "D", "v", "P")
_FLOAT32_LARGEST = 3.4e38


@dataclass(frozen=True)
class Point:
    """One trained network; ``accuracy`` is a share of 1, None if the run diverged."""

    depth: int
    accuracy: float | None


def accuracy_over_depth(series: Mapping[str, Sequence[Point]], title: str, chance: float, path: Path) -> None:
    """Test accuracy over the number of layers, one line for each entry; crosses where a run diverged."""
    figure, axes = _subplots(1, (6.4, 4.2))
    (axis,) = axes
    for i, (name, points) in enumerate(series.items()):
        colour, marker = COLOURS[i % len(COLOURS)], _MARKERS[i % len(_MARKERS)]
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
            linestyle=_DASHES[i % len(_DASHES)],
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
    _save(figure, path)


def norms_over_layers(series: Mapping[str, Sequence[Norms]], title: str, path: Path) -> None:
    """Two panels: activations, and gradients, each over the stations of the network, on a logarithmic axis.

    Norms beyond the largest float32 are where a network in float32 overflows: a line marks it where it is in reach.
    """
    figure, axes = _subplots(2, (10.5, 4.2))
    panels = (
        ("activation", "activation norm  $\\|h^l\\|$", "mean over images"),
        ("gradient", "gradient norm  $\\|\\partial\\ell/\\partial h^l\\|$", "mean over images"),
    )
    for axis, (field, label, unit) in zip(axes, panels, strict=True):
        largest = 0.0
        for i, (name, stations) in enumerate(series.items()):
            values = [getattr(s, field) for s in stations]
            shown = [v if math.isfinite(v) and v > 0 else math.nan for v in values]
            largest = max([largest, *(v for v in shown if not math.isnan(v))])
            axis.plot(
                range(1, len(shown) + 1),
                shown,
                color=COLOURS[i % len(COLOURS)],
                linestyle=_DASHES[i % len(_DASHES)],
                linewidth=2,
                marker=_MARKERS[i % len(_MARKERS)] if len(shown) <= 30 else None,
                label=name,
            )
        axis.set_yscale("log")
        if largest > _FLOAT32_LARGEST / 1e6:
            axis.axhline(_FLOAT32_LARGEST, color="0.5", linewidth=1, linestyle=":")
            axis.annotate(
                "largest float32",
                (0.99, _FLOAT32_LARGEST),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="bottom",
                color="0.4",
                size=9,
            )
        axis.set_xlabel("block, from the input to the output")
        axis.set_ylabel(f"{label}\n({unit})")
        axis.margins(x=0.02)
    axes[1].legend(title="initialisation", loc="upper right", alignment="left", frameon=False)
    figure.suptitle(title, fontsize=11)
    _save(figure, path)


def _subplots(columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    require("matplotlib", "drawing")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure of its own, without pyplot: no global state, no window.
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, columns, i + 1) for i in range(columns)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(True, color="0.92", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160)
    except OSError as error:
        raise UsageError("out", path, f"cannot be written: {error.strerror}") from None

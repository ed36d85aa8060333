"""How the pictures look. No display is needed and no global state is touched.

Colours are Okabe and Ito's, told apart with every kind of colour vision; each line has a marker or dash of its own.
"""

from __future__ import annotations

from typing import Any

from wnfused.diagnostics.drawing import COLOURS, DASHES, MARKERS


def panels(columns: int, rows: int = 1, *, width: float = 4.8, height: float = 3.6) -> tuple[Any, list[Any]]:
    """A figure and its axes, row by row; sizes in inches, of one panel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(True, color="0.92", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes


def style(i: int, *, markers: bool = True) -> dict[str, Any]:
    """Line ``i`` of a panel."""
    look: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i % len(DASHES)], "linewidth": 1.8}
    if markers:
        look |= {"marker": MARKERS[i % len(MARKERS)], "markersize": 6}
    return look


def band(axis: Any, x: Any, mean: Any, std: Any, look: dict[str, Any], label: str | None = None) -> None:
    """A line, and a band of one standard deviation about it; None where there is no value."""
    import numpy

    mean, std = (numpy.array([numpy.nan if v is None else v for v in values], float) for values in (mean, std))
    axis.plot(x, mean, label=label, **look)
    axis.fill_between(x, mean - std, mean + std, color=look["color"], alpha=0.15, linewidth=0)


def depth_ticks(axis: Any, depths: Any) -> None:
    """A logarithmic axis with these depths as its ticks."""
    depths = sorted(depths)
    if not depths:
        return
    axis.set_xscale("log")
    axis.set_xticks(depths, [f"{depth:,}" for depth in depths])
    axis.minorticks_off()
    if len(depths) > 1:
        axis.set_xlim(depths[0] / 1.25, depths[-1] * 1.25)


def legend(axis: Any, title: str | None = None, **options: Any) -> None:
    if axis.get_legend_handles_labels()[1]:
        axis.legend(title=title, alignment="left", frameon=False, fontsize=9, **options)


def legend_below(figure: Any, axis: Any, columns: int) -> None:
    """One legend for all panels, of this one's lines."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def whole_ticks(axis: Any) -> None:
    """Ticks of the horizontal axis at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True))

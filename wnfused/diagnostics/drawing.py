"""How a measurement draws itself: ``draw(ax)``, ``save(path)``, and several of one kind in one picture.

Colours are Okabe and Ito's, told apart with every kind of colour vision; each line has a dash of its own besides.
No display is needed, and matplotlib's global state is left alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from wnfused._numbers import file_path
from wnfused.optional import require

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P")
THEORY = "0.35"
"""The grey of bounds and predictions."""
FORMATS = (".png", ".pdf", ".svg")


class Drawable:
    """A measurement: a dataclass of plain numbers and arrays that can draw and write itself."""

    panels: ClassVar[int] = 1
    """How many axes a picture has."""

    def draw(self, ax: Any = None, *, label: str | None = None) -> Any:
        """Draw onto matplotlib axes.

        Args:
            ax: the axes, a sequence of them if the picture has several ``panels``; None makes a new figure.
            label: of the line, for a legend. Drawn again onto the same axes, a measurement takes the next colour.

        Returns:
            The axes, or a list of them if there are several.

        Raises:
            MissingDependencyError: without matplotlib.
            TypeError: for something else than axes.
            ValueError: for another number of axes than ``panels``.
        """
        require("matplotlib", "drawing")
        axes = new_axes(self.panels) if ax is None else self._checked_axes(ax)
        self._draw(axes, label)
        return axes[0] if self.panels == 1 else axes

    def _checked_axes(self, ax: Any) -> list[Any]:
        from matplotlib.axes import Axes

        if self.panels > 1 and not isinstance(ax, Iterable):
            raise TypeError(f"ax: expected a sequence of {self.panels} axes, got {type(ax).__name__}")
        axes = [ax] if self.panels == 1 else list(ax)
        if len(axes) != self.panels:
            raise ValueError(f"ax: {len(axes)} axes do not fit; {type(self).__name__} draws onto {self.panels}")
        for axis in axes:
            if not isinstance(axis, Axes):
                raise TypeError(f"ax: expected matplotlib's axes, got {type(axis).__name__}")
        return axes

    def save(self, path: str | os.PathLike[str], *, title: str | None = None) -> None:
        """Draw, and write the picture to ``path``, a PNG, PDF or SVG by its ending.

        Raises:
            TypeError: ``path`` is no path; ValueError: for another ending; MissingDependencyError: without matplotlib;
                OSError: as the file system reports it.
        """
        save_together({"": self}, path, title=title)

    def as_json(self) -> dict[str, Any]:
        """Every field as plain JSON types; what is not finite becomes None."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    def _draw(self, axes: Sequence[Any], label: str | None) -> None:
        raise NotImplementedError


def save_together(
    series: Mapping[str, Drawable],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    legend_title: str | None = None,
) -> None:
    """One picture of several measurements of one kind, each under its name. Arguments and errors as ``save``."""
    path = checked_path(path)
    if not isinstance(series, Mapping):
        raise TypeError(f"series: expected measurements by name, got {type(series).__name__}")
    panels = {drawable.panels for drawable in series.values()}
    if len(panels) != 1:
        raise ValueError(f"series: {len(series)} measurements of {len(panels)} kinds do not make one picture; give one")
    axes = new_axes(panels.pop())
    for name, drawable in series.items():
        drawable.draw(axes if drawable.panels > 1 else axes[0], label=name or None)
    figure = axes[0].figure
    _legend(figure, axes, legend_title)
    for axis in axes:
        _plain_ticks(axis)
    if title:
        figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Raises TypeError for what is no path, and ValueError unless pictures can be written under that ending."""
    file_path(path=path)
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"path: {str(path)!r} is no name of a picture; end it in {', '.join(FORMATS)}")
    return path


def new_axes(panels: int) -> list[Any]:
    """Axes side by side in a figure of their own: without pyplot there is no global state and no window."""
    require("matplotlib", "drawing")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.4 + 4.6 * panels if panels > 1 else 6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, panels, i + 1) for i in range(panels)]
    for axis in axes:
        axis.set_prop_cycle(color=COLOURS, linestyle=DASHES)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(True, color="0.92", linewidth=0.8)
        axis.set_axisbelow(True)
    return axes


def over_stations(axis: Any, values: np.ndarray, label: str | None, *, log: bool = True) -> Any:
    """A line over the stations, numbered from 1; markers where there are few. Returns the line."""
    count = len(values)
    marker = MARKERS[len([line for line in axis.get_lines() if line.get_gid() == "stations"]) % len(MARKERS)]
    (line,) = axis.plot(
        np.arange(1, count + 1), values, linewidth=2, label=label, marker=marker if count <= 30 else None, markersize=5
    )
    line.set_gid("stations")
    if log:
        logarithmic(axis, values)
    from matplotlib import ticker

    axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axis.set_xlabel("layer or block, from input to output")
    axis.margins(x=0.02)
    return line


def logarithmic(axis: Any, values: np.ndarray) -> None:
    """A logarithmic axis of y, if any value has a place on it."""
    if (np.isfinite(values) & (values > 0)).any():
        axis.set_yscale("log")


def key(axis: Any, name: str, linestyle: Any = ":", marker: str = "") -> None:
    """An entry for the legend that stands for a kind of line or mark, whatever its colour."""
    axis.plot([], [], color=THEORY, linestyle=linestyle, marker=marker, linewidth=1.2, label=name)


def _legend(figure: Any, axes: Sequence[Any], title: str | None) -> None:
    """One legend for all panels, below them, where it hides nothing; of equal labels the first stands for all."""
    found = itertools.chain.from_iterable(zip(*axis.get_legend_handles_labels(), strict=True) for axis in axes)
    entries: dict[str, Any] = {}
    for handle, name in found:
        entries.setdefault(name, handle)
    grey = [
        name
        for name, handle in entries.items()
        if handle.get_gid() == "theory" or getattr(handle, "get_color", lambda: None)() == THEORY
    ]
    names = [name for name in entries if name not in grey] + grey
    if names:
        # In one row if they fit the width, of about 75 letters a panel; otherwise as many as the longest allows.
        widths = [8 + len(name) for name in names]
        room = 75 * len(axes)
        columns = len(names) if sum(widths) <= room else max(1, room // max(widths))
        handles = [entries[name] for name in names]
        figure.legend(handles, names, title=title, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def _plain_ticks(axis: Any) -> None:
    """Plain numbers on a logarithmic axis of less than two decades, powers of ten on a longer one."""
    from matplotlib import ticker

    if axis.get_yscale() != "log":
        return
    low, high = axis.get_ylim()
    if 0 < low < high < 100 * low and 1e-4 < low < 1e4:
        wide = high > 4 * low
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)) if wide else ticker.MaxNLocator(6))
        axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(ticker.NullFormatter())


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value

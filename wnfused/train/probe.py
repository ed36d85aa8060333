"""``wnfused probe``: norms over the layers of a network as an initialisation leaves it, drawn and as a table."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

from torch import nn

import wnfused
from wnfused.diagnostics import NormProfile, layer_norms
from wnfused.diagnostics.drawing import save_together

from .build import build
from .config import TrainConfig
from .data import Dataset, load
from .errors import UsageError

# So many rows are read at a glance; the picture has them all.
_ROWS = 12


def measure(model: nn.Module, data: Dataset, samples: int) -> NormProfile:
    """Norms on the first ``samples`` training images, in float64, where even an exploding network stays finite."""
    images = data.standardise(data.train.images[:samples]).double()
    # The reference has every dtype; the kernels need not.
    with wnfused.use_backend("reference"):
        return layer_norms(copy.deepcopy(model).double(), images, data.train.labels[:samples])


def probe(configs: Sequence[TrainConfig], samples: int, out: Path, folder: Path | None = None) -> str:
    """Measure one network for each of ``configs``, which differ in the initialisation; draw; the table.

    Raises:
        UsageError: for an argument that cannot work.
    """
    if samples < 1:
        raise UsageError("samples", samples, "must be 1 or more")
    first = configs[0]
    data = load(first.data, first.seed, folder)
    series = {config.init: measure(build(config, data), data, samples) for config in configs}
    title = f"{first.model}, {first.depth:,} layers, {first.data}, before training"
    save_together(series, out, title=title, legend_title="initialisation")
    return f"{_table(series)}\n-> {out}"


def _table(series: dict[str, NormProfile]) -> str:
    names = [norms.name for norms in next(iter(series.values()))]
    stations = sorted({round(i * (len(names) - 1) / (_ROWS - 1)) for i in range(_ROWS)})
    name_width = max(len(names[i]) for i in stations)
    widths = {init: max(len(init), 21) for init in series}
    header = " " * name_width + "".join(f"  {init:>{width}}" for init, width in widths.items())
    units = " " * name_width + "".join(f"  {'activation  gradient':>{width}}" for width in widths.values())
    rows = [header, units]
    for i in stations:
        cells = (f"{norms[i].activation:.3g}  {norms[i].gradient:>8.3g}" for norms in series.values())
        rows.append(
            f"{names[i]:<{name_width}}"
            + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths.values(), strict=True))
        )
    return "\n".join(rows)

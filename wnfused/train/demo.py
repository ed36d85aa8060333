"""``wnfused demo``: networks of growing depth on handwritten digits, with two initialisations, in a few minutes.

The data are scikit-learn's 1,797 real images of 8 x 8 pixels. Every depth is trained twice with the same settings:
with this package's default initialisation (``arpit2019``) and with what PyTorch's weight norm starts from,
``g = ||v||``, on orthogonal directions (``torch_default``): the baseline under that name in the figures of Arpit et
al. Then one step of 10,000 layers is timed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wnfused.diagnostics.drawing import save_together
from wnfused.optional import require
from wnfused.train.budget import Recipe, Schedule, first_batch, time_step, update
from wnfused.train.build import build
from wnfused.train.data import Dataset, load
from wnfused.train.errors import UsageError
from wnfused.train.files import make_folder, write_json
from wnfused.train.interruption import InterruptedRun
from wnfused.train.memory import PeakMemory
from wnfused.train.pictures import Point, accuracy_over_depth
from wnfused.train.probe import measure
from wnfused.train.run import train

INITS = {
    "arpit2019": "wnfused default (Arpit et al. 2019)",
    "torch_default": r"PyTorch default: orthogonal $v$, $g = \|v\|$",
}
RECIPES = (
    Recipe(depth=40, epochs=4, batch_size=32, lr=0.02, warmup=0),
    Recipe(depth=202, epochs=4, batch_size=32, lr=0.02, warmup=0),
    Recipe(depth=1000, epochs=4, batch_size=64, lr=0.01, warmup=1),
)
DEEP = Recipe(depth=10_000, epochs=2, batch_size=32, lr=0.003, warmup=1)
# Both initialisations are probed on so many images.
_PROBED = 32
# Pictures, validation and the start of each run, in seconds, beside the steps themselves.
_OVERHEAD = 30.0


@dataclass(frozen=True)
class Row:
    """One line of the table. ``accuracy`` is a share of 1, None if the run diverged."""

    depth: int
    init: str
    accuracy: float | None
    seconds_per_step: float
    memory_bytes: int


def demo(out: Path, *, minutes: float = 5.0, deep: bool = False) -> int:
    """Train, print the table, and write ``accuracy.png``, ``norms.png`` and ``demo.json`` into ``out``.

    Args:
        minutes: what all of it should take; epochs, then depths, are given up to fit, and the output says which.
        deep: also train the 10,000 layers, beyond ``minutes``.

    Returns:
        0.

    Raises:
        UsageError: if ``out`` cannot be written or ``minutes`` is not positive.
    """
    if not minutes > 0:
        raise UsageError("minutes", minutes, "must be above 0")
    console = require("rich.console", "the demo").Console(highlight=False, soft_wrap=True)
    # Asked for now rather than when minutes of training are over.
    require("matplotlib", "the demo")
    require("lightning.pytorch", "the demo")
    make_folder(out)
    began = time.perf_counter()
    data = load("digits")
    rows, note = _train_all(console, _steps(console, data, minutes * 60 - _OVERHEAD), deep)
    _draw(out, data, rows, max(row.depth for row in rows if row.depth != DEEP.depth))
    console.print(_table(rows))
    if note:
        console.print(
            f"{note}\n--minutes gives them more time; where other processes use the cores, OMP_NUM_THREADS=1 is faster"
        )
    deepest = _deep_step(console, data)
    seconds = time.perf_counter() - began
    write_json(
        out / "demo.json",
        {"rows": [row.__dict__ for row in rows], "deep_step": deepest, "seconds": seconds},
    )
    console.print(f"{out / 'accuracy.png'}, {out / 'norms.png'}, {out / 'demo.json'}  ({seconds / 60:.1f} minutes)")
    return 0


def _steps(console: Any, data: Dataset, seconds: float) -> Schedule:
    """What can be trained in so many seconds: a step of each depth is timed."""
    began = time.perf_counter()
    with console.status("timing one step of each depth"):
        costs = [time_step(recipe, data) for recipe in RECIPES]
    # The 10,000 layers: two steps and the building of it, from what the deepest recipe takes for one.
    last = RECIPES[-1]
    reserved = 3 * costs[-1] * DEEP.depth / last.depth * DEEP.batch_size / last.batch_size
    budget = max(0.0, seconds - reserved - (time.perf_counter() - began))
    schedule = Schedule(RECIPES, costs, len(data.train), len(INITS), budget)
    steps = ", ".join(f"{r.depth:,} layers {c:.3g} s" for r, c in zip(RECIPES, costs, strict=True))
    console.print(f"one step: {steps}; training should take {schedule.plan.seconds / 60:.1f} minutes at most")
    if schedule.plan.note:
        console.print(schedule.plan.note)
    return schedule


# ---------------------------------------------------------------------------------------------------- training


class _Bar:
    """A ``Reporter`` that moves one bar."""

    def __init__(self, progress: Any, task: Any) -> None:
        self.progress, self.task = progress, task

    def on_batch(self, epoch: int, done: int, batches: int) -> None:
        self.progress.update(self.task, completed=epoch * batches + done)

    def on_epoch(self, row: dict[str, float]) -> None:
        self.progress.update(self.task, result=f"validation {row['val_accuracy']:.1%}")


def _train_all(console: Any, schedule: Schedule, deep: bool) -> tuple[list[Row], str]:
    """All runs, one after the other, with all their bars in view; and in words what had to be left out."""
    rich = require("rich.progress", "the demo")
    images = len(load("digits").train)
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("{task.fields[result]}"),
    )
    rows: list[Row] = []
    bars: dict[tuple[int, str], Any] = {}
    with rich.Progress(*columns, console=console) as progress:

        def show(recipes: Sequence[Recipe]) -> None:
            """A bar for each run that is to come, as long as the recipe is now."""
            for recipe in recipes:
                for init in _inits(recipe):
                    name = f"{recipe.depth:>6,} layers  {init:<13}"
                    if (recipe.depth, init) not in bars:
                        bars[recipe.depth, init] = progress.add_task(name, result="", start=False)
                    progress.update(bars[recipe.depth, init], total=recipe.updates(images))

        def train_one(recipe: Recipe, init: str) -> Row:
            task = bars[recipe.depth, init]
            progress.start_task(task)
            row = _train_one(recipe, init, _Bar(progress, task))
            result = "diverged" if row.accuracy is None else f"test accuracy {row.accuracy:.1%}"
            progress.update(task, result=result)
            progress.stop_task(task)
            if not console.is_terminal:
                print(f"{recipe.depth:>6,} layers  {init:<13}  {result}", flush=True)
            return row

        last = (DEEP,) if deep else ()
        show((*schedule.plan.recipes, *last))
        while (recipe := schedule.begin()) is not None:
            found = [train_one(recipe, init) for init in _inits(recipe)]
            rows += found
            schedule.end(min(row.seconds_per_step for row in found))
            show(schedule.plan.recipes)
        for recipe in last:
            rows += [train_one(recipe, init) for init in _inits(recipe)]
    return rows, schedule.note


def _inits(recipe: Recipe) -> list[str]:
    # PyTorch's default cannot train 1,000 layers; what it does with 10,000 needs no half hour.
    return [init for init in INITS if not (recipe is DEEP and init == "torch_default")]


def _train_one(recipe: Recipe, init: str, bar: _Bar) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = train(recipe.config(init), Path(folder) / "run", reporter=bar)
        except InterruptedRun as stop:
            raise stop.bare() from None  # its folder goes
    return Row(
        recipe.depth,
        init,
        None if result["diverged"] else result["test_accuracy"],
        result["seconds_per_step"],
        result["peak_memory_bytes"] - result["baseline_memory_bytes"],
    )


def _deep_step(console: Any, data: Dataset) -> dict[str, float]:
    """One training step of 10,000 layers: seconds to build and initialise, seconds of a step, memory."""
    watch = PeakMemory()
    with console.status(f"building {DEEP.depth:,} layers"):
        began = time.perf_counter()
        model = build(DEEP.config("arpit2019"), data)
        build_seconds = time.perf_counter() - began
    # At the whole rate, without the schedule's warm-up: a step takes as long at any.
    optimizer = torch.optim.SGD(model.parameters(), lr=DEEP.lr, momentum=0.9)
    batch = first_batch(data, DEEP.batch_size)
    with console.status(f"one training step of {DEEP.depth:,} layers"):
        began = time.perf_counter()
        update(model, optimizer, batch)
        step_seconds = time.perf_counter() - began
    memory = watch.peak_bytes() - watch.baseline_bytes
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"{DEEP.depth:,} layers, {parameters / 1e6:.0f} million parameters: built and initialised in "
        f"{build_seconds:.1f} s; one training step of {DEEP.batch_size} images takes {step_seconds:.2f} s and "
        f"{memory / 2**20:,.0f} MiB (the first step: it also allocates)"
    )
    return {"build_seconds": build_seconds, "step_seconds": step_seconds, "memory_bytes": memory}


# --------------------------------------------------------------------------------------------- table, pictures


def _table(rows: list[Row]) -> Any:
    table = require("rich.table", "the demo").Table(
        title="Digits, weight-normalised WRN of width 1",
        caption="torch_default: orthogonal v and g = ||v||, as in the paper's figures. "
        "memory: what the run added to the process's peak",
    )
    for name in ("depth", "init", "test accuracy", "seconds a step", "memory (MiB)"):
        table.add_column(name, justify="left" if name == "init" else "right")
    for row in rows:
        accuracy = "diverged" if row.accuracy is None else f"{row.accuracy:.1%}"
        memory = f"{row.memory_bytes / 2**20:,.0f}"
        table.add_row(f"{row.depth:,}", row.init, accuracy, f"{row.seconds_per_step:.3f}", memory)
    return table


def _draw(out: Path, data: Dataset, rows: list[Row], probed: int) -> None:
    series = {
        label: [Point(row.depth, row.accuracy) for row in rows if row.init == init] for init, label in INITS.items()
    }
    accuracy_over_depth(series, "Weight-normalised WRN on handwritten digits", 0.1, out / "accuracy.png")
    recipe = next(r for r in (*RECIPES, DEEP) if r.depth == probed)
    # Without the head, whose ten logits are another quantity.
    norms = {label: measure(build(recipe.config(init), data), data, _PROBED)[:-1] for init, label in INITS.items()}
    title = f"Weight-normalised WRN of {probed:,} layers before training"
    save_together(norms, out / "norms.png", title=title, legend_title="initialisation")

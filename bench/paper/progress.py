"""What is seen while the jobs run: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from typing import Any

from wnfused.optional import require

_SECONDS_BETWEEN_LINES = 30.0


class Bars:
    """One bar for each figure; the total is what its budget may leave out, too."""

    def __init__(self, works: list[Any]) -> None:
        rich = require("rich.progress", "the progress of bench.paper")
        columns = (
            rich.TextColumn("{task.description:<11}"),
            rich.BarColumn(),
            rich.MofNCompleteColumn(),
            rich.TextColumn("jobs"),
            rich.TimeElapsedColumn(),
            rich.TextColumn("{task.fields[state]}"),
        )
        self.progress = rich.Progress(*columns)
        self.bars = {
            w.name: self.progress.add_task(
                w.name, total=len(w.jobs), completed=len(w.schedule.done), start=False, state=""
            )
            for w in works
        }

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def begin(self, work: Any) -> None:
        self.progress.start_task(self.bars[work.name])

    def step(self, work: Any) -> None:
        self.progress.update(self.bars[work.name], completed=len(work.schedule.done), state=_spent(work))

    def end(self, work: Any) -> None:
        self.step(work)
        self.progress.stop_task(self.bars[work.name])


class Lines:
    """For logs."""

    def __init__(self, works: list[Any]) -> None:
        self.last = time.monotonic()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, work: Any) -> None:
        pass

    def step(self, work: Any) -> None:
        if time.monotonic() - self.last > _SECONDS_BETWEEN_LINES:
            self.end(work)

    def end(self, work: Any) -> None:
        print(f"{work.name}: {len(work.schedule.done)} of {len(work.jobs)} jobs, {_spent(work)}", flush=True)
        self.last = time.monotonic()


def _spent(work: Any) -> str:
    budget = work.schedule.budget
    return f"{work.schedule.spent / 60:.1f}" + ("" if budget is None else f" of {budget / 60:.1f}") + " core-minutes"

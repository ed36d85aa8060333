"""Progress of a training run on the terminal, or as plain lines where the output is no terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from wnfused.optional import require


class Console:
    """A ``Reporter`` for the command line: a line for each epoch and, on a terminal, a bar for the one under way."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        self._progress: Any = None
        self._bar: Any = None

    def __enter__(self) -> Console:
        if sys.stdout.isatty():
            progress = require("rich.progress", "the progress bar")
            self._progress = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeRemainingColumn(),
                transient=True,
            )
            self._progress.start()
            self._bar = self._progress.add_task("starting", total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def on_batch(self, epoch: int, done: int, batches: int) -> None:
        if self._progress is not None:
            self._progress.update(
                self._bar, description=f"epoch {epoch + 1}/{self.epochs}", completed=done, total=batches
            )

    def on_epoch(self, row: dict[str, float]) -> None:
        line = (
            f"epoch {int(row['epoch']) + 1}/{self.epochs}  lr {row['lr']:.3g}  train loss {row['train_loss']:.4f}  "
            f"validation accuracy {row['val_accuracy']:.3f}"
        )
        if self._progress is not None:
            self._progress.console.print(line, highlight=False)
        else:
            print(line, flush=True)

"""Progress of a measurement: none by default, a bar of ``rich`` with ``progress=True``, or a caller's function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from wnfused.optional import require

Progress = bool | Callable[[int, int | None], None]
"""False: nothing is shown. True: a bar on the terminal. A function: called with (steps done, steps in all or None)."""


@contextlib.contextmanager
def advancing(progress: Progress, description: str, total: int | None) -> Iterator[Callable[[], None]]:
    """A function to call once after each of ``total`` steps (None: it is not known how many there will be).

    Raises:
        TypeError: for anything else; MissingDependencyError: for ``progress=True`` without ``rich``.
    """
    done = 0
    show: Callable[[int, int | None], None] | None
    with contextlib.ExitStack() as stack:
        if callable(progress):
            show = progress
        elif not isinstance(progress, bool):
            raise TypeError(f"progress: {progress!r} must be True, False or a function")
        elif progress:
            rich = require("rich.progress", "the progress bar")
            columns = (
                rich.TextColumn("{task.description}"),
                rich.BarColumn(),
                rich.MofNCompleteColumn(),
                rich.TimeElapsedColumn(),
            )
            bars = stack.enter_context(rich.Progress(*columns, transient=True))
            task = bars.add_task(description, total=total)
            show = lambda done, total: bars.update(task, completed=done)  # noqa: E731
        else:
            show = None

        def advance() -> None:
            nonlocal done
            done += 1
            if show is not None:
                show(done, total)

        yield advance

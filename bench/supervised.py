"""Work done in processes of its own, which may crash, hang or run out of time without taking the rest along.

A worker is a command that is given two files: the names of its items, one a line, and a file to which it appends a line
of JSON as each item begins and another as it ends. What it had done counts, whatever became of it; the item that it
died over is told apart, and a new worker goes on with the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

POISONED = 17
"""The status of a worker that ends itself: after an error of the device nothing that it ran would mean anything."""

Outcome = dict[str, Any]


class Reporter:
    """The worker's side: ``begin`` and ``end`` an item; each is on disk before anything else happens."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a")

    def begin(self, item: str) -> None:
        self._line({"item": item})

    def end(self, item: str, outcome: Outcome) -> None:
        self._line({"item": item, "outcome": outcome})

    def _line(self, content: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(content) + "\n")
        self._file.flush()


def run(
    command: Sequence[str],
    items: Sequence[str],
    limit: float,
    patience: float | Mapping[str, float],
    log: Path,
    *,
    seen: Callable[[str, Outcome], None] = lambda item, outcome: None,
    **environment: str,
) -> dict[str, Outcome]:
    """What became of each item: what the worker reported, or a ``status`` and ``why`` where it could not.

    Args:
        limit: seconds for all items.
        patience: seconds in which something must begin or end, or those of each item; the longest of all while a worker
            has begun none.
        seen: called for each item once its outcome is known.
    """
    end = time.monotonic() + limit
    found: dict[str, Outcome] = {}

    def note(item: str, outcome: Outcome) -> None:
        found[item] = outcome
        seen(item, outcome)

    ended = ""
    while left := [item for item in items if item not in found]:
        if time.monotonic() > end:
            ended = "time was up"
            break
        before = len(found)
        begun, ended = _one_worker(command, left, end, patience, log, note, environment)
        if begun is not None:
            note(begun, {"status": "died", "why": ended})
        if len(found) == before:
            break
    for item in items:
        if item not in found:
            note(item, {"status": "not reached", "why": ended})
    return found


def _one_worker(
    command: Sequence[str], items: Sequence[str], end: float, patience: float | Mapping[str, float], log: Path,
    note: Callable[[str, Outcome], None], environment: Mapping[str, str],
) -> tuple[str | None, str]:  # fmt: skip
    """The item over which a worker died, if it did, and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        todo, done = Path(folder, "todo"), Path(folder, "done")
        todo.write_text("\n".join(items) + "\n")
        done.write_text("")
        read, begun, last = 0, None, time.monotonic()
        with process([*command, str(todo), str(done)], log, **environment) as worker:
            while True:
                status = worker.poll()
                text = done.read_text()
                for line in text[read : text.rfind("\n") + 1].splitlines():
                    content, last = json.loads(line), time.monotonic()
                    begun = content["item"] if "outcome" not in content else None
                    if begun is None:
                        note(content["item"], content["outcome"])
                read = text.rfind("\n") + 1
                now = time.monotonic()
                if status is not None:
                    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
                    return begun, f"the process ended with {how}"
                if now > end:
                    return begun, "time was up"
                if isinstance(patience, Mapping):
                    allowed = patience[begun] if begun else max(patience.values())
                else:
                    allowed = patience
                if now - last > allowed:
                    return begun, f"nothing happened for {allowed:.0f} s"
                time.sleep(0.1)


@contextlib.contextmanager
def process(command: Sequence[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command in the checkout, its output added to ``log``; nothing that it started outlives the context."""
    root = Path(__file__).resolve().parents[1]
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    # A group of its own, so that all of it can be ended; in the same session, so that it ends with this one.
    group: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
    with log.open("a") as file:
        started = subprocess.Popen(
            command, cwd=root, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"} | environment, **group,
        )  # fmt: skip
    try:
        yield started
    finally:
        # Asked first: a build tool ends its compilers, which are in groups of their own.
        for ending, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(started.pid, ending)
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(patience)


def finished(command: Sequence[str], limit: float, log: Path, **environment: str) -> int | None:
    """The status of a command that runs to its end; None where time was up."""
    with process(command, log, **environment) as started:
        try:
            return started.wait(limit)
        except subprocess.TimeoutExpired:
            return None

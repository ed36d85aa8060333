"""Other programs that want the processors, too: what a shared machine does to a run."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def busy(programs: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many processes, each a loop that never waits, for as long as the context lasts."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(programs)]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()

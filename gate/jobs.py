"""Compilations side by side. Not in ``__main__``: a spawned process could not find its functions there."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Protocol

from gate.rows import Verdict


class Job(Protocol):
    def run(self) -> list[Verdict]: ...


def _run(job: Job) -> list[Verdict]:
    return job.run()


def verdicts(jobs: Sequence[Job], processes: int) -> list[Verdict]:
    """Runs the jobs side by side, in their order."""
    if processes == 1 or len(jobs) < 2:
        found = map(_run, jobs)
        return [verdict for some in found for verdict in some]
    # Spawned, not forked: compilers keep threads and locks.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return [verdict for some in pool.map(_run, jobs) for verdict in some]

"""Which jobs of a figure are run within its budget.

The first round's jobs are begun in order until the budget is spent. A later round is begun only if what the rounds
before it took on average still fits; once begun it is finished. Time is processor time, so the choice does not depend
on what else the machine is doing, and what a stopped run has spent counts when it is resumed.
"""

from __future__ import annotations

from collections.abc import Iterable

from bench.paper.figure import Job, grouped


class Schedule:
    """The jobs of one figure, those already done, and its budget in processor seconds (None: everything)."""

    def __init__(self, jobs: Iterable[Job], done: dict[str, float], budget: float | None) -> None:
        self.rounds = [members for _, members in sorted(grouped(jobs, lambda job: job.round).items())]
        self.done = dict(done)
        self.budget = budget
        self.under_way: set[str] = set()
        self.failed: set[str] = set()

    @property
    def spent(self) -> float:
        return sum(self.done.values())

    def next(self) -> Job | None:
        """The job to begin now; None if there is none to begin before one that is under way ends, or at all."""
        for i, members in enumerate(self.rounds):
            open_jobs = [job for job in members if job.name not in self._touched]
            if not open_jobs:
                continue
            if not self._allowed(i, members):
                return None
            self.under_way.add(open_jobs[0].name)
            return open_jobs[0]
        return None

    def finish(self, job: Job, seconds: float) -> None:
        self.under_way.discard(job.name)
        self.done[job.name] = seconds

    def fail(self, job: Job) -> None:
        self.under_way.discard(job.name)
        self.failed.add(job.name)

    @property
    def finished(self) -> bool:
        """Nothing is under way and nothing will be begun."""
        if self.under_way:
            return False
        job = self.next()
        if job is not None:
            self.under_way.discard(job.name)
        return job is None

    @property
    def _touched(self) -> set[str]:
        return self.under_way | self.done.keys() | self.failed

    def _allowed(self, i: int, members: list[Job]) -> bool:
        if self.budget is None:
            return True
        if i == 0:
            return self.spent < self.budget
        if any(job.name in self._touched for job in members):
            return True
        earlier = [job.name for members in self.rounds[:i] for job in members if job.name in self.done]
        if not earlier:
            return False
        mean = sum(self.done[name] for name in earlier) / len(earlier)
        expected = mean * (len(members) + len(self.under_way))
        return self.spent + expected <= self.budget

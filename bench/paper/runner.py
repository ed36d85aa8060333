"""Runs the figures' jobs in parallel processes of one thread each, and publishes each figure as soon as it is done."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import machine
from bench.paper import figure as figures
from bench.paper.figure import Figure, Job, Json
from bench.paper.schedule import Schedule
from bench.paper.store import Done, Store


@dataclass
class Work:
    """One figure under way."""

    name: str
    module: Figure
    settings: Json
    store: Store
    schedule: Schedule
    jobs: list[Job]
    commit: str | None
    errors: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, size: str, folder: Path, minutes: float | None) -> Work:
        """``minutes`` of one core, None for no limit. Jobs that an earlier run finished are not done again."""
        module = figures.load(name)
        settings = module.SETTINGS[size]
        jobs = module.jobs(settings)
        store = Store(folder, name)
        store.prepare(jobs)
        done = {job.name: found.seconds for job in jobs if (found := store.read(job))}
        budget = None if minutes is None else 60 * minutes
        return cls(name, module, settings, store, Schedule(jobs, done, budget), jobs, machine.commit())

    def done(self) -> list[Done]:
        return [found for job in self.jobs if (found := self.store.read(job))]


def _begin_worker(scratch: Path) -> None:
    import torch

    from bench.paper import training

    # Ctrl-C reaches the whole process group; the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    training.scratch = scratch


def _end_with_parent() -> None:
    """A parent that was killed tells nobody; its workers must not go on, or wait, for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_job(figure: str, parameters: Json) -> tuple[Json, float]:
    """In a worker: the job's result and the processor seconds it took."""
    began = time.process_time()
    values = figures.load(figure).run(parameters)
    return values, time.process_time() - began


def run(works: list[Work], workers: int, scratch: Path, progress: Any, finished: Callable[[Work], None]) -> None:
    """All figures, in order; ``finished`` is called with each as its last job ends.

    A figure's last jobs and the next one's first share the workers. ``scratch``: for what jobs keep while they run.
    ``progress`` has ``begin(work)``, ``step(work)``
    and ``end(work)``.
    """
    if workers == 0:
        for work in works:
            finished(work)
        return
    context = multiprocessing.get_context("spawn")
    running: dict[Future[tuple[Json, float]], tuple[Work, Job]] = {}
    open_works = list(works)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker, initargs=(scratch,))
    try:
        while open_works:
            for work in [w for w in open_works if w.schedule.finished]:
                open_works.remove(work)
                progress.end(work)
                finished(work)
            for work, job in _to_begin(open_works, workers - len(running)):
                progress.begin(work)
                running[pool.submit(_run_job, work.name, job.parameters)] = (work, job)
            if running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    work, job = running.pop(future)
                    _take(future, work, job)
                    progress.step(work)
    finally:
        _end(pool)


def _to_begin(works: list[Work], free: int) -> Iterator[tuple[Work, Job]]:
    for work in works:
        while free > 0 and (job := work.schedule.next()) is not None:
            free -= 1
            yield work, job


def _take(future: Future[tuple[Json, float]], work: Work, job: Job) -> None:
    try:
        values, seconds = future.result()
        work.store.write(job, values, seconds, work.commit)
        work.schedule.finish(job, seconds)
    except BrokenProcessPool:
        # The worker is gone (killed, out of memory), and with it the pool; what is done is on the disk.
        raise
    except Exception as error:  # whatever the job raised is the job's failure, told at the end
        work.schedule.fail(job)
        work.errors[job.name] = "".join(traceback.format_exception(error))
        print(f"{work.name}: {job.name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def _end(pool: ProcessPoolExecutor) -> None:
    """Not waiting for the jobs under way: interrupted, nobody wants their results. Lightning catches SIGTERM."""
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()
        process.join()

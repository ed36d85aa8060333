"""``python -m bench.gpu_worker WHAT TODO DONE``: the processes that ``bench/gpu.py`` starts; see ``bench.supervised``.

``collect`` names the tests of files and folders as items; ``tests`` runs some; ``measure`` measures the passes of
workloads.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.supervised import POISONED, Reporter

RATES = "rates"
"""The item that is the machine's measured ceilings, and how many clusters of the stage by wgmma run on it at once."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_worker", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time of a pass")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("what", choices=("collect", "tests", "measure"))
    parser.add_argument("todo", type=Path)
    parser.add_argument("done", type=Path)
    options = parser.parse_args()
    items, reporter = options.todo.read_text().split("\n")[:-1], Reporter(options.done)
    if options.what == "measure":
        return measure(items, reporter, options.seconds, options.device)
    import pytest

    collects = options.what == "collect"
    arguments = ["--collect-only", *items] if collects else ["--verbose", *items]
    plugin = _Collector(reporter, items) if collects else _Recorder(reporter)
    return int(pytest.main(["-p", "no:cacheprovider", *arguments], [plugin]))


def _device_works() -> bool:
    """False after an illegal access and the like, which spoil everything that the process does from there on."""
    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"the device is lost to this process: {error}", file=sys.stderr, flush=True)
        return False
    return True


# ------------------------------------------------------------------------------------------------------- tests


class _Collector:
    """A plugin that reports every collected test, and then what they were collected from."""

    def __init__(self, reporter: Reporter, whole: Sequence[str]) -> None:
        self.reporter, self.whole = reporter, whole
        self.broken: dict[str, str] = {}

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.broken[report.nodeid] = str(report.longrepr).strip().splitlines()[-1]

    def pytest_collection_finish(self, session: Any) -> None:
        for item in session.items:
            self.reporter.end(item.nodeid, {})
        for name in self.whole:
            wrong = [f"{file}: {why}" for file, why in self.broken.items() if file.startswith(name)]
            outcome = {"status": "failed", "why": "; ".join(wrong)} if wrong else {"status": "collected"}
            self.reporter.end(name, outcome)


class _Recorder:
    """A plugin that reports each test, and ends the process where the device is lost to it."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.outcome: dict[str, Any] = {}

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.outcome = {"status": "passed"}
        self.reporter.begin(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.outcome = {"status": "skipped", "why": reason.removeprefix("Skipped: ")}
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash is not None else str(report.longrepr)
            self.outcome = {"status": "failed", "why": "\n".join(said.strip().splitlines()[:3])}

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.reporter.end(nodeid, self.outcome)
        if self.outcome["status"] == "failed" and not _device_works():
            os._exit(POISONED)


# ---------------------------------------------------------------------------------------------------- measuring


def key(workload: Any, pass_name: str) -> str:
    """The name of a workload's pass as an item."""
    return f"{workload.group}: {workload.name}, {pass_name}"


def measure(items: Sequence[str], reporter: Reporter, seconds: float, device: str) -> int:
    """Pass by pass, so that one which fails or hangs costs no other; the status for the process to end with.

    Neighbouring passes of a workload share what was made for the first, its modules and float64's results, as long as
    none fails.
    """
    from bench import cases, gpu_workloads

    known = {
        key(workload, name): (workload, name)
        for workload in (*gpu_workloads.WORKLOADS, *gpu_workloads.REHEARSAL)
        for name in workload.passes
    }
    current: Any = None
    results: Iterator[Any] = iter(())
    for number, item in enumerate(items):
        reporter.begin(item)
        workload, _ = known.get(item, (None, ""))
        if workload is None or workload is not current:
            results, current = iter(()), workload
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            if workload is not None:
                left = tuple(known[it][1] for it in items[number:] if it in known and known[it][0] is workload)
                results = cases.run(dataclasses.replace(workload, passes=left), seconds, device)
        outcome = _tried(_rates if item == RATES else functools.partial(_row, results))
        if outcome["status"] == "failed":
            current = None
        reporter.end(item, outcome)
        if not _device_works():
            return POISONED
    return 0


def _rates() -> dict[str, Any]:
    from bench import roofline
    from wnfused.backends import native_cuda

    found: dict[str, Any] = {"rates": dataclasses.asdict(roofline.measure()), "warpgroup_clusters": None}
    if native_cuda.unavailable() is None and torch.cuda.get_device_capability() == (9, 0):
        try:
            found["warpgroup_clusters"] = torch.ops.wnfused_native.cuda_warpgroup_clusters()
        except RuntimeError as error:  # a query that has never run must not cost the ceilings
            found["warpgroup_clusters"] = str(error)
    return found


def _row(results: Iterator[Any]) -> dict[str, Any]:
    return {"results": [next(results).to_dict()]}


def _tried(measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"status": "measured", **measured()}
    except Exception as error:  # out of memory perhaps: one pass must not cost the others
        first = (str(error).strip().splitlines() or [""])[0]
        return {"status": "failed", "why": f"{type(error).__name__}: {first}"}


if __name__ == "__main__":
    sys.exit(main())

"""``python -m bench.gpu_worker WHAT TODO DONE``: the processes that ``bench/gpu.py`` starts; see ``bench.supervised``.

``collect`` names the tests of ``tests/test_gpu.py`` as items; ``tests`` runs some; ``measure`` measures workloads.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.supervised import POISONED, Reporter

RATES = "rates"
"""The item that is the machine's measured ceilings."""


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
        for item in items:
            reporter.begin(item)
            reporter.end(item, _measured(item, options.seconds, options.device))
            if not _device_works():
                return POISONED
        return 0
    import pytest

    collects = options.what == "collect"
    arguments = ["--collect-only", *items] if collects else ["--verbose", *items]
    return int(pytest.main(["-p", "no:cacheprovider", *arguments], [_Collector(reporter) if collects else
                                                                   _Recorder(reporter)]))  # fmt: skip


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
    """A plugin that reports every collected test."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter

    def pytest_collection_finish(self, session: Any) -> None:
        for item in session.items:
            self.reporter.end(item.nodeid, {})
        self.reporter.end("tests/test_gpu.py", {"status": "collected"})


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


def key(workload: Any) -> str:
    """A workload's name as an item."""
    return f"{workload.group}: {workload.name}"


def _measured(item: str, seconds: float, device: str) -> dict[str, Any]:
    from bench import cases, gpu_workloads, roofline

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    try:
        if item == RATES:
            return {"status": "measured", "rates": asdict(roofline.measure())}
        (workload,) = (w for w in (*gpu_workloads.WORKLOADS, *gpu_workloads.REHEARSAL) if key(w) == item)
        results = [result.to_dict() for result in cases.run(workload, seconds, device)]
    except Exception as error:  # out of memory perhaps: one workload must not cost the others
        first = (str(error).strip().splitlines() or [""])[0]
        return {"status": "failed", "why": f"{type(error).__name__}: {first}"}
    return {"status": "measured", "results": results}


if __name__ == "__main__":
    sys.exit(main())

"""The pytest-benchmark suites: each peer of a workload's pass is one benchmark, gated before it is timed.

They time peers one after the other, which is handy for one peer's history (``--benchmark-compare``); ratios come from
``python -m bench``, which interleaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench import gate, peers
from bench.workloads import WORKLOADS, DeepStep, Depths, Orthogonal, Workload


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="all workloads, not only the quick ones")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every peer of each pass. What is measured between several networks, or in processes of its own, stays out."""
    full = metafunc.config.getoption("--full")
    chosen = [w for w in WORKLOADS if (full or w.quick) and not isinstance(w, (DeepStep, Depths))]
    cases = [(w, p, name) for w in chosen for p in w.passes for name in dict.fromkeys((*w.ours, *w.peers))]
    if metafunc.function.__name__ == "bench_init":
        cases = [case for case in cases if isinstance(case[0], Orthogonal)]
        ids = [f"{w.group}-{name}-{w.name}" for w, _, name in cases]
        metafunc.parametrize(("workload", "peer"), [(w, name) for w, _, name in cases], ids=ids)
    else:
        cases = [case for case in cases if not isinstance(case[0], Orthogonal)]
        ids = [f"{w.group}-{name}-{p}-{w.name}" for w, p, name in cases]
        metafunc.parametrize(("workload", "pass_name", "peer"), cases, ids=ids)


_problems: dict[Workload, gate.Problem] = {}


def _problem(workload: Workload) -> gate.Problem:
    """One problem at a time: the oracle is computed once for all peers, and forgotten with the workload."""
    if workload not in _problems:
        _problems.clear()
        torch._dynamo.reset()
        _problems[workload] = gate.Problem(workload)
    return _problems[workload]


@pytest.fixture
def time_peer(benchmark: Any) -> Callable[[Workload, str, str], None]:
    """Gates one peer, then times it. A wrong peer fails, an unavailable one is skipped with the reason."""

    def run(workload: Workload, pass_name: str, peer: str) -> None:
        benchmark.group = f"{workload.group}: {workload.name}, {pass_name}"
        try:
            subject = peers.subject(_problem(workload), peer)
            gated = peers.gated(subject, peer, pass_name)
        except peers.Unavailable as reason:
            pytest.skip(str(reason))
        benchmark.extra_info["errors"] = gated.errors
        with gated.runner.context():
            benchmark(gated.runner.call)

    return run

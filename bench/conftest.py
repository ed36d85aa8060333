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
from bench.workloads import WORKLOADS, DeepStep, Orthogonal, Workload


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="all workloads, not only the quick ones")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A function ``bench_GROUP`` runs the workloads of its group; what needs processes of its own stays out."""
    group = metafunc.function.__name__.removeprefix("bench_")
    full = metafunc.config.getoption("--full")
    chosen = [w for w in WORKLOADS if w.group == group and (full or w.quick) and not isinstance(w, DeepStep)]
    cases = [(w, p, name) for w in chosen for p in w.passes for name in dict.fromkeys((*w.ours, *w.peers))]
    metafunc.parametrize(("workload", "pass_name", "peer"), cases, ids=[f"{name}-{p}-{w.name}" for w, p, name in cases])


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
        assert not isinstance(workload, Orthogonal)
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

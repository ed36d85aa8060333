"""``pytest bench --benchmark-only``, with ``-k conv3x3`` for one group; ``conftest.py`` says which workloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench import initialisation


def bench_peer(time_peer: Callable[..., None], workload: Any, pass_name: str, peer: str) -> None:
    time_peer(workload, pass_name, peer)


def bench_init(benchmark: Any, workload: Any, peer: str) -> None:
    benchmark.group = f"init: {workload.name}"
    gated = initialisation.gated(workload, peer)
    benchmark.extra_info["errors"] = gated.errors
    benchmark(gated.runner.call)

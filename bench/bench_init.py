"""``pytest bench/bench_init.py --benchmark-only``"""

from __future__ import annotations

from typing import Any

from bench import initialisation


def bench_init(benchmark: Any, workload: Any, pass_name: str, peer: str) -> None:
    benchmark.group = f"init: {workload.name}"
    gated = initialisation.gated(workload, peer)
    benchmark.extra_info["errors"] = gated.errors
    benchmark(gated.runner.call)

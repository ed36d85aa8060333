"""``pytest bench/bench_stage.py --benchmark-only``"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def bench_stage(time_peer: Callable[..., None], workload: Any, pass_name: str, peer: str) -> None:
    time_peer(workload, pass_name, peer)

"""``pytest bench/bench_linear.py --benchmark-only``"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def bench_linear(time_peer: Callable[..., None], workload: Any, pass_name: str, peer: str) -> None:
    time_peer(workload, pass_name, peer)

"""``pytest bench/bench_conv.py --benchmark-only``"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def bench_conv3x3(time_peer: Callable[..., None], workload: Any, pass_name: str, peer: str) -> None:
    time_peer(workload, pass_name, peer)


def bench_conv1x1(time_peer: Callable[..., None], workload: Any, pass_name: str, peer: str) -> None:
    time_peer(workload, pass_name, peer)


def bench_windows(time_peer: Callable[..., None], workload: Any, pass_name: str, peer: str) -> None:
    time_peer(workload, pass_name, peer)


def bench_heads(time_peer: Callable[..., None], workload: Any, pass_name: str, peer: str) -> None:
    time_peer(workload, pass_name, peer)

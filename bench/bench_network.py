"""``pytest bench/bench_network.py --benchmark-only``; WRN-10,000 is in ``python -m bench --group deep`` alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def bench_network(time_peer: Callable[..., None], workload: Any, pass_name: str, peer: str) -> None:
    time_peer(workload, pass_name, peer)


def bench_converted(time_peer: Callable[..., None], workload: Any, pass_name: str, peer: str) -> None:
    time_peer(workload, pass_name, peer)


def bench_digits(time_peer: Callable[..., None], workload: Any, pass_name: str, peer: str) -> None:
    time_peer(workload, pass_name, peer)


def bench_depth(time_peer: Callable[..., None], workload: Any, pass_name: str, peer: str) -> None:
    time_peer(workload, pass_name, peer)

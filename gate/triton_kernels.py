"""The Triton kernels: every configuration of the table, compiled with no GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

from gate.rows import Verdict


@dataclass(frozen=True)
class Job:
    def run(self) -> list[Verdict]:
        return []


def missing() -> str | None:
    """Why no Triton kernel can be compiled here."""
    return None if importlib.util.find_spec("triton") else "the package triton is not installed"


def jobs(capabilities: list[int]) -> Iterator[Job]:
    yield from ()
